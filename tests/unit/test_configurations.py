"""Classes of configurations that differ in a keyword, and which calls tell them apart."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tiebreak.kernels.external import external_kernel
from tiebreak.programs import check
from tiebreak.programs.configurations import Configurations, Looks
from tiebreak.reports import cli

pytestmark = pytest.mark.usefixtures("settled_once", "folder")
TARGET = "mine.py:attention"
KERNEL = """
import torch

def attention(q, k, v, *, causal=False, scale=None, cast="fp32", order=1):
    if order == 3:
        raise NotImplementedError("no third order")
    s = q.float() @ k.float().mT * scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    o = p.to(v.dtype).float() @ v.float()
    o = o.to(v.dtype).float() if cast == "bf16" else o
    return (o / p.sum(-1, keepdim=True)).to(q.dtype)
"""
FEW = ("--cases", "tied_maxima[k=2],no_tail", "--heads", "32", "-n", "0")


def test_values_of_keywords_are_put_into_classes_and_the_worst_comes_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file sees nothing of pytest: Triton's tutorial has one configuration where it does."""
    (tmp_path / "mine.py").write_text(f"import os\nassert 'PYTEST_VERSION' not in os.environ\n{KERNEL}")
    assert check.main([TARGET, "--configs", "cast=fp32,bf16", "--configs", "order=1,2,3", *FEW]) == 0
    headline, configs, *lines = capsys.readouterr().out.splitlines()
    assert headline == "PASS: attention[cast=bf16] on cpu, bf16: biased on 1 of 1 failure input, by its own rounding"
    assert configs.startswith(
        "  configs     4, 2 of other bits on 4 heads of 2 calls (1 with gradients), told apart by "
    )
    assert configs.endswith("; refused on every call: [order=3]")
    assert lines[0].startswith(
        "  equal bits  [cast=bf16]: PASS: biased on 1 of 1 failure input, by its own rounding; tied_ma"
    )
    assert lines[1].startswith(
        "  equal bits  [cast=fp32] [order=1] [order=2]: PASS: unbiased on 1 of 1 failure input; "
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--configs", "all"),
            "--configs all: there are none, or no case is a call; name NAME=V1,V2 of a keyword; all",
        ),
        (("--configs", "cast"), "--configs cast: there are none, or no case is a call; name NAME=V1,V2"),
        (("--configs", "kast=1,2"), "mine.py:attention[kast=1]: it has no parameter 'kast'; after q, k and v it has "),
        (("--configs", "cast=fp32,bf16", "--seed", "x"), "--seed x: expected a positive integer"),
        (("other.py:f", "--configs", "all"), "--configs: 2 targets; name one"),
    ],
)
def test_what_is_no_configuration_is_one_line_and_exit_code_2(
    words: Sequence[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["check", TARGET, *words, "--cases", "no_tail"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"tiebreak check: {line}")
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_as_few_calls_as_it_takes_tell_classes_apart() -> None:
    looks: Looks = {
        "f[a=1]": {"one": ("x",), "two": ("x",), "three": ("x",)},
        "f[a=2]": {"one": ("y",), "two": ("x",), "three": ("y",)},
        "f[a=3]": {"one": ("x",), "two": ("x",), "three": ("z",)},
        "f[a=4]": {"one": ("x",), "two": ("y",), "three": ("z",)},
        "f[a=5]": {"one": ("x",), "two": ("y",), "three": ("z",)},
    }
    found = Configurations("f", ["a=1,2,3,4,5"], lambda targets: {each: looks[each] for each in targets})
    assert found.classes == [["f[a=1]"], ["f[a=2]"], ["f[a=3]"], ["f[a=4]", "f[a=5]"]]
    assert found.telling() == ["three", "two"]


def test_a_target_may_name_a_configuration() -> None:
    kernel = external_kernel(f"{TARGET}[cast=bf16+order=2]")
    options = kernel.caller.convention.options
    assert (kernel.name, options.options) == ("attention[cast=bf16+order=2]", {"cast": "bf16", "order": 2})
    assert kernel.origin == ("--kernel", f"{TARGET}[cast=bf16+order=2]")
    assert external_kernel(f"{TARGET}[forward.A=1+B=x]").caller.convention.options.config == "forward.A=1+B=x"
