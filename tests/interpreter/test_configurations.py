"""`tiebreak check --configs` on autotuned kernels: which configuration is launched, and which one is to blame."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tiebreak.backends.backend import CPU
from tiebreak.backends.interpreter import INTERPRETER
from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.triton.loading import Tuning
from tiebreak.programs import check
from tiebreak.reports.records import store
from tiebreak.reports.verdict import Verdicts
from tiebreak.studies.cells import CASES

SIZES = [triton.Config({"SIZE": size}, num_warps=warps) for size, warps in ((4, 4), (8, 4), (4, 8), (64, 4))]
#: Of these the third alone casts its running sum, the second differs in warps alone, and a compiler refuses the fourth.
TUNED = """
@triton.autotune([
    triton.Config({"COLUMNS": 64, "NARROW": False}, num_warps=4),
    triton.Config({"COLUMNS": 64, "NARROW": False}, num_warps=8),
    triton.Config({"COLUMNS": 64, "NARROW": True}, num_warps=4),
    triton.Config({"COLUMNS": 128, "NARROW": False}, num_warps=8),
], key=["keys"])
@triton.jit
def forward("""


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel of a few lines, autotuned; its target."""
    text = Path(__file__).with_name("few_lines.py").read_text()
    for before, after in (
        ("\n@triton.jit\ndef forward(", TUNED),
        ("COLUMNS: tl.constexpr)", "COLUMNS: tl.constexpr, NARROW: tl.constexpr)"),
        (
            "        m = new\n",
            "        if NARROW:\n            o = o.to(O.dtype.element_ty).to(tl.float32)\n        m = new\n",
        ),
        ("    head = tl", "    tl.static_assert(COLUMNS <= D)\n    head = tl"),
        (", COLUMNS=min(64, k.shape[2]))", ")"),
    ):
        assert before in text
        text = text.replace(before, after, 1)
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return "mine.py:attention"


def test_the_configuration_that_sums_in_bf16_is_caught_and_named(
    tuned: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--cases", "random", "--heads", "32", "--plan", "flash@fused,tile=64", "-n", "0", "--json", "v.json")
    assert check.main([tuned, "--configs", "all", "--backend", "interpreter", *words]) == 1
    headline, configs, *classes = capsys.readouterr().out.splitlines()[:4]
    assert headline.startswith(
        "FAIL: attention[forward.COLUMNS=64+NARROW=True] on interpreter, bf16: wrong on 1 of 1 input ("
    )
    assert configs.startswith(
        "  configs     2, 2 of other bits on 4 heads of 1 call (0 with gradients), told apart by random;"
    )
    assert " 1 more, by num_warps and the like alone, have the same bits by assumption: " in configs
    assert configs.endswith("; refused on every call: [forward.COLUMNS=128+NARROW=False]")
    assert classes[0].startswith("  equal bits  [forward.COLUMNS=64+NARROW=True]: FAIL: wrong on 1 of 1 input (")
    assert classes[1].startswith("  equal bits  [forward.COLUMNS=64+NARROW=False]: PASS: no failure input was run, ")
    worst, sound = store.load(tmp_path / "v.json", Verdicts).verdicts
    assert (worst.headline, worst.ok, sound.ok) == (headline, False, True)
    assert (worst.findings[0].name, worst.findings[0].cases) == ("configs", ("random",))
    assert "[forward.COLUMNS=64+NARROW=True]" in worst.failed[0].command


def test_compiled_code_is_asked_with_each_number_of_warps(tuned: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cases", "random", "--heads", "4", "--plan", "flash@fused,tile=64", "-n", "0")
    assert check.main([tuned, "--configs", "all", "--backend", "ptx", "--as", "sm_80", *words]) == 1
    configs, *classes = capsys.readouterr().out.splitlines()[1:4]
    assert configs.startswith("  configs     3, 2 of other bits on 4 heads of 1 call")
    assert "by assumption" not in configs
    assert "refused on every call: [forward.COLUMNS=128+NARROW=False+num_warps=8+" in configs
    (sound,) = (line for line in classes if "NARROW=False" in line)
    assert all(f"[forward.COLUMNS=64+NARROW=False+num_warps={warps}+" in sound for warps in (4, 8))


def _sized(Y: Any, SIZE: tl.constexpr) -> None:
    tl.static_assert(SIZE < 64)
    tl.store(Y + tl.arange(0, 1), float(SIZE))


def test_a_launch_is_in_the_configuration_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, y = triton.autotune(SIZES, key=[])(triton.jit(_sized)), torch.zeros(1)
    monkeypatch.setattr(Tuning, "left", {})

    def launched(chosen: str) -> float:
        monkeypatch.setattr(Tuning, "chosen", chosen)
        with interpreting(EXACT):
            kernel[(1,)](y)
        return y.item()

    assert [launched(chosen) for chosen in ("", "_sized.SIZE=8", "another.SIZE=8")] == [4, 8, 4]
    assert {words: len(each) for words, each in Tuning.left["_sized"].items()} == {
        "SIZE=4": 2,
        "SIZE=8": 1,
        "SIZE=64": 1,
    }
    with pytest.raises(
        CannotRunError, match=r"^_sized\.SIZE=5: not left by the kernel's pruning here: SIZE=4, SIZE=8,"
    ):
        launched("_sized.SIZE=5")
    with pytest.raises(CannotRunError, match="a static_assert refuses it"):
        launched("_sized.SIZE=64")
    assert kernel.cache == {}


@pytest.mark.parametrize(("backend", "name"), [(INTERPRETER, "forwards"), (CPU, "forward")])
def test_a_configuration_that_is_not_launched_is_never_told_of_another(tuned: str, backend: Any, name: str) -> None:
    kernel = external_kernel(f"{tuned}[{name}.COLUMNS=32+NARROW=False]")
    inputs = CASES["random"].make(1, 0, 1, BF16)
    with pytest.raises(CannotRunError):
        backend.run(kernel, inputs, gradients=True)
