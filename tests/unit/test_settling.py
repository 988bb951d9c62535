"""A kernel's plan is settled before its cells: whichever of them come first, and in whichever process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tiebreak.backends.backend import CPU
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.identity import Identification
from tiebreak.matrix.identification import settling
from tiebreak.matrix.identification.settling import designed_answers, explaining, plan_of, probe_of
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Emulated, Settings, Settled, Workbench
from tiebreak.studies.cells import CASES, judged

# Eager attention in one tile, S in fp32; of `clamped` no known plan explains the designed inputs.
KERNELS = """
import torch


def eager(q, k, v, *, causal=False, scale=None, most=None):
    s = (q.float() @ k.float().mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).tril().logical_not(), -torch.inf)
    s = s if most is None else s.clamp(max=most)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return ((p.to(v.dtype) @ v).float() / p.sum(-1, keepdim=True)).to(q.dtype)


def clamped(q, k, v, *, causal=False, scale=None):
    return eager(q, k, v, causal=causal, scale=scale, most=-1.0)


def nan_if_large(q, k, v):
    return (q @ k.mT).half().float().mean() * 0 + eager(q, k, v)


def zeros_if_large(q, k, v):
    return nan_if_large(q, k, v).nan_to_num(0.0)


def raises_if_large(q, k, v):
    if nan_if_large(q, k, v).isnan().any():
        raise ValueError("too large")
    return eager(q, k, v)


def flat_if_large(q, k, v):
    o = nan_if_large(q, k, v)
    return o.flatten() if o.isnan().any() else o


def ends(q, k, v):
    import os
    os._exit(3)
"""


@pytest.fixture
def named(tmp_path: Path) -> Callable[[str], Cell]:
    (tmp_path / "mine.py").write_text(KERNELS)
    return lambda name: Cell(CPU, external_kernel(f"{tmp_path / 'mine.py'}:{name}"), OneCall(CASES["random"]), BF16)


@pytest.mark.parametrize("name", ["eager", "clamped"])
def test_no_order_and_no_subset_of_cells_changes_a_record(named: Callable[[str], Cell], name: str) -> None:
    kernel = named(name).kernel
    experiments: list[Experiment] = [OneCall(CASES[case]) for case in ("random", "tied_maxima[k=2]")]
    experiments += [Identification()] if name == "eager" else []  # for another it searches for minutes
    cells = [Cell(CPU, kernel, each, BF16) for each in experiments]
    rounds = []
    for order in (cells, cells[::-1], cells[:1]):
        bench = Workbench(Settings(heads=16))
        rounds.append({each.id: run_cell(each, bench) for each in order})
    assert rounds[0] == rounds[1]
    assert rounds[2].items() <= rounds[0].items()
    assert rounds[0][cells[0].id].answers["accuracy"].passed is (name == "eager")


def test_plans_compute_o_of_designed_inputs_once_for_all_kernels(
    named: Callable[[str], Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = plan_of(named("eager"), Workbench(Settings()))
    monkeypatch.setattr(Emulated, "output", lambda *_: pytest.fail("a plan has computed it anew"))
    probed = probe_of(named("eager"), Workbench(Settings()))
    assert explaining(probed, designed_answers(probed)) == settled.followed


def test_one_process_asks_and_the_others_take_what_it_found(
    named: Callable[[str], Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan_of(named("eager"), Workbench(Settings(), tmp_path))
    assert first.followed is not None
    assert first.rests_on.startswith(CPU.evidence)
    monkeypatch.setattr(settling, "_settle", lambda *_: pytest.fail("it was asked twice"))
    assert plan_of(named("eager"), Workbench(Settings(), tmp_path)) == first


def test_who_waits_takes_what_is_found_meanwhile(
    named: Callable[[str], Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, key = Settled("what another process found", "flash@fused"), "cpu-eager-bf16"

    def wait(*_: object) -> None:
        settling.file_of(tmp_path, key, "settled").write_bytes(msgspec.json.encode(found))

    monkeypatch.setattr(settling, "_settle", lambda *_: pytest.fail("it was asked twice"))
    monkeypatch.setattr("tiebreak.matrix.identification.settling.fcntl.flock", wait)
    assert plan_of(named("eager"), Workbench(Settings(), tmp_path)) == found


def test_what_a_budget_ends_in_the_midst_of_asking_is_asked_again(
    named: Callable[[str], Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> Settled:
        raise KeyboardInterrupt

    monkeypatch.setattr(settling, "_settle", ended)
    with pytest.raises(KeyboardInterrupt):
        plan_of(named("eager"), Workbench(Settings(), tmp_path))
    monkeypatch.setattr(settling, "_settle", lambda *_: Settled("the second time"))
    assert plan_of(named("eager"), Workbench(Settings(), tmp_path)).rests_on == "the second time"


def test_a_kernel_that_ends_its_process_costs_the_others_nothing(named: Callable[[str], Cell], tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tiebreak.backends.backend import CPU\n"
        "from tiebreak.kernels.external import external_kernel\n"
        "from tiebreak.kernels.formats import BF16\n"
        "from tiebreak.matrix.experiment import Cell\n"
        "from tiebreak.matrix.experiments.identity import Identification\n"
        "from tiebreak.matrix.identification.settling import plan_of\n"
        "from tiebreak.matrix.workbench import Settings, Workbench\n"
        "cell = Cell(CPU, external_kernel(sys.argv[1]), Identification(), BF16)\n"
        "plan_of(cell, Workbench(Settings(), Path(sys.argv[2])))\n"
    )
    target = named("ends").kernel.origin[1]
    command = [sys.executable, "-c", script, target, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ended:
        assert ended.stdout is not None
        ended.stdout.read()  # to its end: nobody has waited for the process, as nobody waits for a run's worker
        assert plan_of(named("ends"), Workbench(Settings(), tmp_path)) == Settled(
            "nothing: as it was asked for its plan, its process ended"
        )
    assert ended.returncode == 3


def test_what_leaves_the_device_beyond_use_is_raised_once_and_asked_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def attention(q, k, v):\n    raise RuntimeError('illegal address')\n")
    cell = Cell(CPU, external_kernel(f"{tmp_path / 'mine.py'}:attention"), Identification(), BF16)
    with monkeypatch.context() as patch:
        patch.setattr(type(CPU), "poisoned", lambda _: True)
        with pytest.raises(RuntimeError, match="illegal address"):
            plan_of(cell, Workbench(Settings(), tmp_path))
    monkeypatch.setattr(settling, "_settle", lambda *_: pytest.fail("it was asked again"))
    assert plan_of(cell, Workbench(Settings(), tmp_path)) == Settled("nothing: illegal address")


def test_what_it_raises_leaves_its_plan_unknown(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def attention(q, k, v):\n    raise ValueError('not I')\n")
    raising = Cell(CPU, external_kernel(f"{tmp_path / 'mine.py'}:attention"), Identification(), BF16)
    wrong = "asked for its plan, it raised ValueError: not I (mine.py, line 2)"
    assert plan_of(raising, Workbench(Settings())) == Settled("nothing: not I", wrong=wrong)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nan_if_large", "NaN or Inf"),
        ("zeros_if_large", "0 throughout"),
        ("raises_if_large", "raised ValueError: too large"),
        ("flat_if_large", "shape"),
    ],
)
def test_an_output_that_only_tells_the_plan_has_to_be_attention_too(
    named: Callable[[str], Cell], name: str, what: str
) -> None:
    """Scores beyond fp16 are in a designed input alone, not in the cell that fails for it."""
    record = judged(named(name).kernel, "random", 32)
    assert record.outcome == "failed"
    assert [check for check, answer in record.answers.items() if answer.passed is False] == ["contract"]
    assert what in (record.answers["contract"].why or "")


def test_random_bits_are_seen_also_where_one_row_hides_them() -> None:
    """At this seed O of the very first row of `random` lies where dithering turns few of its bits."""
    loops = Path(__file__).parents[1] / "defects/loops.py"
    settling_of = {
        name: plan_of(
            Cell(CPU, external_kernel(f"{loops}:{name}"), OneCall(CASES["random"]), BF16), Workbench(Settings(seed=68))
        ).candidates
        for name in ("dithered", "split")
    }
    assert settling_of["dithered"] == ("dithered@fused",)
    assert settling_of["split"] != ("dithered@fused",)
