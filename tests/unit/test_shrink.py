"""`tiebreak shrink`: the smallest input on which a kernel still goes wrong, and the script that shows it."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiebreak.backends.backend import CPU
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference
from tiebreak.programs.shrink import command as shrink
from tiebreak.programs.shrink.search import FINITE, MANY, Part, Shrinker, cut
from tiebreak.reports import cli
from tiebreak.studies.cells import CASES

KERNEL = """
import torch
from tiebreak import kernel

def unfused(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return ((p.to(q.dtype) @ v) / p.sum(-1, keepdim=True)).to(q.dtype)

def exact(q, k, v, *, causal=False, scale=None):
    return ((q.double() @ k.double().mT * scale).softmax(-1) @ v.double()).to(q.dtype)

def doubled(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * scale
    p = torch.exp(s - 2 * s.amax(-1, keepdim=True))
    return (p @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)

def zero(q, k, v, *, causal=False, scale=None):
    return torch.zeros_like(q)

@kernel(layout="bnhd")
def tokens_first(q, k, v, is_causal):
    return torch.zeros_like(q)

def masked(q, k, v, *, attn_mask=None, scale=None):
    return torch.zeros_like(q)

@kernel(square=True)
def square(q, k, v, is_causal):
    return torch.zeros_like(q)

@kernel(layout="nd")
def single(q, k, v):
    return torch.zeros_like(q)

@kernel(layout="bnhd")
def writes(q, k, v, out, causal, scale):
    out.zero_()

class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        return torch.zeros_like(q), None

several = Several.apply

class Attention:
    def plain(q, k, v):
        return torch.zeros_like(q)

def picky(q, k, v, *, causal=False, scale=None):
    assert q.shape[-1] % 16 == 0 and k.shape[-2] % 8 == 0
    return unfused(q, k, v, scale=scale)
"""
LINES = 20  # of a script whose tensors take one line each
OVERFLOWS = ("mine.py:doubled", "--case", "repeated_large[r=105]", "--heads", "32")


def call(*words: str) -> int:
    return cli.main(["shrink", *words])


def run_script(path: Path = Path("shrunk.py")) -> bool:
    """Whether the script says in this process, where torch is imported already, that something is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        # What Python knows of another folder, or of the file as it was before.
        patch.delitem(sys.path_importer_cache, ".", raising=False)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "inside")]:
            patch.delitem(sys.modules, name)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path))
    return end.value.code == 1


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts are run again in this process: another takes seconds to import torch."""
    monkeypatch.setattr(shrink, "_rechecked", run_script)
    return folder


def shape() -> tuple[int, ...]:
    """That of k in the script."""
    match = re.search(r"^k = bits\(\(([\d, ]+)\)", Path("shrunk.py").read_text(), re.MULTILINE)
    assert match is not None
    return tuple(map(int, match[1].split(",")))


def test_a_part_is_what_it_was_in_the_whole_and_has_its_scale() -> None:
    rng = torch.Generator().manual_seed(1)
    q, do = (torch.randn(2, 4, 5, 8, generator=rng) for _ in range(2))
    k, v = (torch.randn(2, 2, 7, 8, generator=rng) for _ in range(2))
    q[..., 6:] = 0.0  # columns that may go
    inputs = AttentionInputs(q, k, v, do, Formats.of(BF16))
    part = cut(inputs, Part((1,), (0, 1), (1,), (0, 3), tuple(range(7)), tuple(range(6)), causal=False))
    assert (part.groups, part.scale) == (1, inputs.scale)
    expected = reference(inputs).o[1:, [1, 3]][:, :, [0, 3], :6]
    torch.testing.assert_close(reference(part).o, expected)


def test_under_a_mask_rows_keep_their_keys() -> None:
    """A kernel that is wrong under a mask alone, in its last row."""

    def masked(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
        o = reference(inputs).o.bfloat16().float()
        if inputs.causal:
            assert reference(inputs).p.gt(0).any(-1).all()
            o[:, :, -1] = torch.nan
        return AttentionOutput(o)

    inputs = CASES["random_causal"].make(1, 0, 2, BF16)
    shrinker = Shrinker(CPU, Kernel("masked", masked, None, takes=COMMON), inputs, lambda line: None)
    shrinker.shrink(FINITE)
    assert shrinker.part.causal
    assert len(shrinker.part.queries) == len(shrinker.part.keys) == len(shrinker.part.columns) == 1


def test_exact_ties_that_all_break_one_way_are_shown_by_many_heads() -> None:
    def upwards(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
        o = reference(inputs).o.float()
        return AttentionOutput(((o.view(torch.int32) + 0x8000) & -65536).view(torch.float32))

    inputs = CASES["no_tail"].make(1, 0, 64, BF16)
    shrinker = Shrinker(CPU, Kernel("upwards", upwards, None, takes=COMMON), inputs, lambda line: None)
    shrinker.bias(1.0)
    part = shrinker.part
    assert shrinker.finding.name == "mean"
    assert (len(part.batch) * len(part.heads), len(part.queries), len(part.keys)) == (MANY, 1, 2)


def test_the_script_shows_it_with_torch_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("mine.py:unfused", "--case", "tied_maxima[k=2]", "--heads", "32") == 0
    output = capsys.readouterr()
    assert re.search(r"^O is -?\d\.\d+, not the nearest to -?\d\.\d+: off by \+0\.50\d ulp$", output.out, re.MULTILINE)
    assert "keys 3, d 2" in output.out
    text = (folder / "shrunk.py").read_text()
    assert "tiebreak." not in text
    assert re.findall(r"^(?:import|from) .*", text, re.MULTILINE) == ["import importlib, sys, torch"]
    assert shape() == (1, 1, 3, 2)
    assert max(map(len, text.splitlines())) < 200
    assert len(text.splitlines()) == LINES
    assert run_script()
    assert capsys.readouterr().out in output.out


def test_the_script_of_a_kernel_that_was_mended_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*OVERFLOWS) == 0
    assert shape() == (1, 1, 1, 1)
    (here / "mine.py").write_text(KERNEL.replace("2 * s.amax", "s.amax"))
    assert not run_script()
    assert capsys.readouterr().out.endswith("nothing is wrong\n")


@pytest.mark.usefixtures("here")
def test_what_the_kernel_refuses_is_not_left() -> None:
    assert call("mine.py:picky", "--case", "tied_maxima[k=2]", "--heads", "32") == 0
    *_, keys, d = shape()
    assert keys in (8, 16)
    assert d == 16


TOKENS_FIRST = "*(x.permute(0, 2, 1, 3).contiguous() for x in (q, k, v)), "


@pytest.mark.parametrize(
    ("kernel", "captured", "written"),
    [
        ("mine.py:tokens_first", {"causal": "true"}, f"kernel.tokens_first({TOKENS_FIRST}is_ca"),
        ("mine.py:writes", {"causal": "true"}, f"contiguous(), torch.nan), kernel.writes({TOKENS_FIRST}"),
        ("mine.py:several", {"causal": "false", "scale": "0.5"}, "kernel.several(q, k, v, 0.5)[0]"),
        ("mine.py:Attention.plain", {"causal": "false"}, "kernel.Attention.plain(q, k, v)"),
        ("inside/deep/mine.py:zero", {"causal": "true"}, "kernel.zero(q, k, v, "),
    ],
)
def test_the_script_calls_a_kernel_as_its_signature_and_its_author_say(
    here: Path, capsys: pytest.CaptureFixture[str], kernel: str, captured: dict[str, str], written: str
) -> None:
    deep = here / "inside" / "deep"
    deep.mkdir(parents=True)
    for package in (deep, deep.parent):
        (package / "__init__.py").touch()
    (deep / "mine.py").write_text("from .other import zero\n")
    (deep / "other.py").write_text(KERNEL)
    rng = torch.Generator().manual_seed(1)
    layer: dict[str, Tensor] = {
        f"layer0.{part}": torch.randn(1, 4, 8, 8, generator=rng) for part in ("q", "k", "v", "do")
    }
    save_file(layer, here / "inputs-1.safetensors", captured)
    assert call(kernel, "--case", "captured[step=1.layer=0]", "--captured", ".") == 0
    text, out = (here / "shrunk.py").read_text(), capsys.readouterr().out
    assert written in text
    assert "beyond the rounding-error bound" in out
    assert len(text.splitlines()) == LINES
    if "plain" in kernel:  # with fewer columns a kernel without a scale would be called with another than the reference
        assert ", d 8; written" in out


@pytest.mark.usefixtures("here")
def test_ctrl_c_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = Shrinker.keeps

    def keeps(self: Shrinker, *given: Any) -> bool:
        if self.trials == 6:
            raise KeyboardInterrupt
        return original(self, *given)

    monkeypatch.setattr(Shrinker, "keeps", keeps)
    assert call(*OVERFLOWS) == 130
    assert shape() == (1, 1, 8, 64)
    assert "interrupted; the best so far is kept" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_script_that_does_not_show_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shrink, "script", lambda *given: "print('nothing is wrong')\n")
    assert call(*OVERFLOWS) == 1
    assert "does not show it when run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine.py:none --case random", "mine.py:none: mine.py has no function"),
        ("mine.py:exact --case none", "--case: unknown case 'none': `tiebreak list cases` names them"),
        ("mine.py:exact --case x --captured nosuch", "--captured nosuch: no such folder"),
        ("mine.py:exact --case random --backend emulation", "--backend emulation: a kernel of yours"),
        ("mine.py:exact --case random -o mine.py", "-o mine.py: there is such a file"),
        ("mine.py:exact --case random -o mine.py/x.py", "cannot write records to mine.py: "),
        ("mine.py:exact --case padded", "--case padded: has a key padding mask"),
        ("mine.py:exact --case random", "nothing is wrong on random (mean error of O "),
        ("mine.py:masked --case random_causal", "mine.py:masked: the script has no words"),
        ("mine.py:square --case random", "mine.py:square: the script has no words"),
        ("mine.py:single --case random", "mine.py:single: the script has no words"),
        ("mine.py:unfused --case tied_maxima[k=2] --check finite", "--check finite: nothing of that"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert call(*words.split()) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"tiebreak shrink: {message}")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["mine.py"]
