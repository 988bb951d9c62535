"""The types of the public names; `make lint` holds a user's file, user_file.py, to what a checker makes of them."""

import inspect
import os
import re
import subprocess
import sys
import typing

import pytest

import tiebreak
from tiebreak.backends.provenance import CHECKOUT
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.matrix.options import FORWARDED, Option
from tiebreak.programs import pair
from tiebreak.programs.checking import CheckOptions


def test_the_typed_options_are_those_of_the_command() -> None:
    typed = typing.get_type_hints(CheckOptions)
    assert set(typed) == set(FORWARDED)

    def expected(option: Option) -> object:
        if option.repeats:
            return list[str]
        if option.choices is not None:
            return typing.Literal[option.choices]
        return str if option.metavar else bool

    others = {"seed": int, "heads": int, "cell_timeout": float}
    assert typed == {name: others.get(name, expected(option)) for name, option in FORWARDED.items()}
    parsed = vars(pair._parser().parse_args(["a", "b"])).keys() - {"a", "b", "json", "markdown", "figure"}
    assert {*inspect.signature(pair.pair).parameters} - {"a", "b", "tell"} == parsed


def test_to_name_the_types_imports_no_torch_and_a_wheel_has_them() -> None:
    code = "import sys, tiebreak; assert tiebreak.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
    stub = (CHECKOUT / "kernels" / "public" / "__init__.pyi").read_text(encoding="utf-8")
    assert sorted(re.findall(r"import \w+ as (\w+)", stub)) == sorted(tiebreak.__all__)
    data = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.setuptools.package-data]")[2]
    assert '"*" = ["py.typed", "*.pyi"]' in data
    assert (CHECKOUT / "kernels" / "public" / "py.typed").exists()


def test_a_wrong_word_of_the_decorator_is_one_line_when_it_runs() -> None:
    with pytest.raises(ValueError, match="unknown word 'layuot'"):
        tiebreak.kernel(layuot="bnhd")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        KernelOptions("bnhd")  # type: ignore[call-arg]
