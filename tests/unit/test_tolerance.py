"""`tiebreak tolerance`: limits that follow from a plan, what keeps within them, and what they let pass."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.bounds import ErrorBounds
from tiebreak.defects.planted import DEFECTS, twin
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, FP16, Format
from tiebreak.kernels.inputs import GRADIENT_NAMES
from tiebreak.kernels.kernel import Kernel, composed
from tiebreak.kernels.reference import reference
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.identification.settling import NORMAL
from tiebreak.matrix.workbench import Settings, Settled, SharedBatch, Workbench
from tiebreak.programs.tolerance import Size, Tolerance, Tolerances, normal_inputs, tolerances
from tiebreak.reports import cli

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = Size(16, 48)
FUSED = "flash@fused,tile=32"
BIASED, TRUNCATED = "all of it is 0.25 ulp too large", "O is truncated, not rounded"
KERNEL = """
import torch

def sound(q, k, v, *, causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

def half_too_large(q, k, v, *, causal=False, scale=None):
    return sound(q, k, v, causal=causal, scale=scale) * 1.5

def raising(q, k, v):
    raise RuntimeError("no luck")
"""


def planned(plan: str) -> Kernel:
    return composed(plan, parse_declaration(plan))


def found(kernel: Kernel, seed: int = 1, size: Size = SMALL, fmt: Format = BF16, known: str = "") -> Tolerances:
    """The tolerances of a kernel; of a user's by a plan that is taken to be known, which spares a search."""
    backend, bench = (EMULATION if kernel.declaration else CPU), Workbench(Settings(seed))
    bench.settled[backend.name, kernel.name, fmt.name] = Settled("a test", known or None)
    return tolerances(Cell(backend, kernel, OneCall(NORMAL[0]), fmt), bench, size)


def of(all_of: Tolerances, output: str) -> Tolerance:
    return next(each for each in all_of.outputs if each.output == output)


@pytest.mark.parametrize("fmt", [BF16, FP16])
@pytest.mark.parametrize("plan", [FUSED, "flash@all_bf16,tile=32", "standard,s=input", "fair"])
def test_a_sound_kernel_keeps_within_its_tolerance_and_within_that_of_another_seed(plan: str, fmt: Format) -> None:
    first = found(planned(plan), 1, fmt=fmt)
    for seed in range(2, 12):
        inputs = normal_inputs(fmt, SMALL, seed)
        batch = SharedBatch(inputs, reference(inputs))
        output = EMULATION.run(planned(plan), inputs, gradients=True)
        assert output.gradients is not None
        made: list[Tensor] = [output.o, *(getattr(output.gradients, name) for name in GRADIENT_NAMES)]
        for limit, out, exact in zip(first.outputs, made, (batch.ref.o, *batch.gradients.gradients), strict=True):
            assert 0.0 < limit.share(out, exact).worst < 1.0, f"{limit.output}, seed {seed}"


def test_a_tolerance_covers_the_bound_of_every_element_and_is_a_wider_plans_own() -> None:
    inputs = normal_inputs(BF16, SMALL, 1)
    ref = reference(inputs)
    limit = of(found(planned(FUSED)), "O")
    bound = ErrorBounds(inputs, ref).of(parse_declaration(FUSED))
    allowed = limit.atol + limit.rtol * ref.o.abs()
    assert (bound <= allowed).all()
    assert (bound > 0.99 * allowed).any(), "it is as tight as atol and rtol can say it"
    assert of(found(planned("flash@all_bf16,tile=32")), "O").atol > 1.5 * limit.atol
    assert of(found(planned(FUSED), fmt=FP16), "O").atol < 0.5 * limit.atol


def test_what_passes_is_measured_and_a_bias_is_among_it() -> None:
    made = found(planned(FUSED), size=Size(128, 48, causal=True))
    shares = of(made, "O").mistakes
    assert shares[BIASED].elements < 1.0
    assert shares[TRUNCATED].elements < 1.0
    assert shares["scores are not scaled"].elements > 1.0
    assert shares["the causal mask is not applied"].elements > 1.0
    gradient = of(made, "dQ").mistakes["the scale is missing"]
    assert gradient.elements > 1.0
    assert gradient.norm is not None
    assert gradient.norm > 1.0
    assert "delta is missing" not in of(made, "dV").mistakes, "which it does not change"
    assert all(share.elements > 1e-3 for each in made.outputs for share in each.mistakes.values())


@pytest.mark.parametrize(("name", "passes"), [("scaled_twice", False), ("truncated_p", True)])
def test_a_planted_kernel_exceeds_the_tolerance_of_its_sound_twin_or_is_listed_as_passing(
    name: str, passes: bool
) -> None:
    own, sound = (of(found(kernel, known="flash@fused"), "O") for kernel in (DEFECTS[name].kernel, twin("tiled")))
    assert sound.kernel.elements < 0.5
    assert (own.kernel.elements <= 1.0) == passes
    assert not passes or sound.mistakes["P is truncated, not rounded"].elements <= 1.0


def test_a_nan_is_within_no_tolerance() -> None:
    limit, exact = Tolerance("dQ", 1.0, 1.0, 1.0, 1.0), torch.ones(3, dtype=torch.float64)
    lost = exact.clone()
    lost[1] = math.nan
    assert limit.share(lost, exact).elements == math.inf
    assert limit.share(lost, exact).norm == math.inf


def test_the_command_prints_a_table_a_json_and_lines_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ["--shape", "16,48", "--shape", "16,32,causal"]
    assert cli.main(["tolerance", FUSED, *shape, "--dtype", "bf16,fp16", "--json", "t.json"]) == cli.PASSED
    shown = capsys.readouterr().out
    assert shown.startswith(f"PASS: {FUSED} on emulation: ")
    assert "bf16 16,48" in shown
    assert "fp16 16,32,causal" in shown
    assert "a bias passes" in shown
    kept = json.loads(Path("t.json").read_text(), parse_constant=pytest.fail)
    assert [each["size"] for each in kept["tolerances"][:2]] == [
        {"d": 16, "keys": 48, "causal": False},
        {"d": 16, "keys": 32, "causal": True},
    ]
    assert kept["tolerances"][0]["plan"] == FUSED
    assert {each["output"] for each in kept["tolerances"][0]["outputs"]} == {"O", "dQ", "dK", "dV"}
    assert kept["tolerances"][0]["outputs"][0]["mistakes"][BIASED]["elements"] < 1.0
    assert cli.main(["tolerance", FUSED, *shape[:2], "--paste"]) == cli.PASSED
    lines, inputs = capsys.readouterr().out, normal_inputs(BF16, SMALL, 3)
    batch = SharedBatch(inputs, reference(inputs))
    names = dict(zip(("out", "dq", "dk", "dv"), (batch.ref.o, *batch.gradients.gradients), strict=True))
    refs = {f"{name}_ref": exact for name, exact in names.items()} | {"torch": torch}
    exec(lines, {**{name: exact.bfloat16() for name, exact in names.items()}, **refs})
    with pytest.raises(AssertionError):
        exec(lines, {**names, **refs, "dq": names["dq"] * 1.5})


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["mine.py:half_too_large"], cli.FAILED, "FAIL: "),
        (["mine.py:raising"], cli.USAGE, "no luck"),
        (["mine.py:none"], cli.USAGE, "has no function"),
        ([FUSED, "--shape", "16"], cli.USAGE, "expected D,N"),
        ([FUSED, "--shape", "16,100000"], cli.USAGE, "at most"),
        ([FUSED, "--dtype", "fp32"], cli.USAGE, "unknown format"),
        ([FUSED, "--backend", "nowhere"], cli.USAGE, "nowhere"),
        ([FUSED, "--json", "no/folder.json"], cli.USAGE, "there is no folder"),
    ],
)
def test_exit_codes_and_what_they_say(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(KERNEL)
    small = [] if "--shape" in words else ["--shape", "16,32"]
    assert cli.main(["tolerance", *words, *small]) == code
    out, err = capsys.readouterr()
    assert message in (out if code == cli.FAILED else err)
    assert err.count("\n") == (0 if code == cli.FAILED else 1)
