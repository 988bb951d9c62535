"""The plug-in that pytest loads wherever tiebreak is installed: until it sees `--kernel` it imports nothing else.

`pytest --kernel my_attention.py:attention` then runs the matrix for that kernel, in a repository with its own tests.
"""

from collections.abc import Generator

import pytest

_PLUGIN, _CELLS = "tiebreak.matrix.plugin", "tiebreak.matrix.test_cells"
_FLAG = "--kernel"


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Bring the matrix in, after the repository's own conftest files: their options come first."""
    yield
    has_kernel = any(word == _FLAG or word.startswith(f"{_FLAG}=") for word in args)
    if early_config.pluginmanager.has_plugin(_PLUGIN) or not has_kernel:
        return
    try:
        early_config.pluginmanager.import_plugin(_PLUGIN)
    except ValueError as error:  # argparse's, of an option that is there already
        problem = f"{_FLAG}: a conftest.py here and tiebreak have an option of one name ({error})"
        raise pytest.UsageError(f"{problem}; `tiebreak check` loads no conftest.py") from error
    early_config.option.plugins.append(_PLUGIN)  # for the workers, which are not told what was asked for
    if _CELLS not in args:
        args += ["--pyargs", _CELLS]  # in addition to what is named: a kernel that is given is never left out
