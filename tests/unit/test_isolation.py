"""A kernel under test that changes its process: it falls for it, and no other cell has anything of it."""

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.external import external_kernel, isolation
from tiebreak.kernels.external.isolation import kept_state, own_randomness
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import FELL, HELD, Record

CASES = {case.name: case for case in SCRIPTED}
PLAIN = """
import os
import random

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, *, causal=False, scale=None):
    {body}
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""
# What a kernel does, by what a broken contract calls it.
CHANGES: Mapping[str, tuple[str, ...]] = {
    "torch's flushing of subnormals": ("torch.set_flush_denormal(True)",),
    "torch's default dtype": ("torch.set_default_dtype(torch.float64)",),
    "torch's default device": ("torch.set_default_device('meta')",),
    "torch's number of threads": ("torch.set_num_threads(torch.get_num_threads() + 2)",),
    "torch's grad mode": ("torch.set_grad_enabled(not torch.is_grad_enabled())",),
    "torch's autocast": (
        "torch.autocast('cpu', torch.bfloat16).__enter__()",
        "torch.set_autocast_dtype('cpu', torch.float16)",
    ),
    "torch's deterministic algorithms": (
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
    ),
    "torch's precision of fp32 products": (
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.fp32_precision = 'tf32'",
    ),
    "torch's choice of attention kernels": ("torch.backends.cuda.enable_flash_sdp(False)",),
    "the environment": ("os.environ.pop('PATH')", "os.environ['PATH'] = '/'"),
    "the working directory": ("os.chdir('/')",),
}
ALL = [(name, body) for name, bodies in CHANGES.items() for body in bodies]
# After what was changed: a kernel of torch's own, a composed one on the device, and the suite's own arithmetic; a tie,
# and values so small that a device that flushes loses them.
LATER = [
    *((CPU, CPU.kernel("sdpa_flash"), case) for case in ("tied_maxima[k=2]", "subnormal_v")),
    *((backend, composed_kernel("flash@paper"), "subnormal_v") for backend in (CPU, EMULATION)),
]


def kernel_file(folder: Path, body: str = "pass") -> str:
    (folder / "mine.py").write_text(PLAIN.format(body=body), encoding="utf-8")
    return f"{folder / 'mine.py'}:attention"


def summary(record: Record) -> tuple[object, ...]:
    """The parts of a record that do not depend on the cells before it."""
    return record.id, record.outcome, record.digest, record.measures, record.answers


def in_one_process(folder: Path, body: str, case: str = "random_odd") -> tuple[Record, list[tuple[object, ...]]]:
    """The record of a kernel that does something first, and of the cells after it."""
    bench = Workbench(Settings(seed=1, heads=16))
    mine = external_kernel(kernel_file(folder, body))
    first = run_cell(Cell(CPU, mine, Call(CASES[case]), BF16), bench)
    later = [Cell(backend, kernel, Call(CASES[case]), BF16) for backend, kernel, case in LATER]
    return first, [summary(run_cell(cell, bench)) for cell in later]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    first, later = in_one_process(tmp_path_factory.mktemp("sound"), "pass")
    assert first.outcome == HELD
    assert first.met("contract")
    return later


def test_every_switch_is_tried() -> None:
    assert [switch.name for switch in isolation._SWITCHES] == list(CHANGES)


@pytest.mark.parametrize(("name", "body"), ALL, ids=[body for _, body in ALL])
def test_a_kernel_that_changes_its_process_falls_and_takes_no_other_cell_with_it(
    tmp_path: Path, undisturbed: list[tuple[object, ...]], name: str, body: str
) -> None:
    state = [(switch.name, switch.get()) for switch in isolation._SWITCHES]
    fell, later = in_one_process(tmp_path, body)
    assert later == undisturbed
    assert [(switch.name, switch.get()) for switch in isolation._SWITCHES] == state
    assert fell.outcome == FELL
    assert list(fell.answers) == ["contract"]
    assert fell.answers["contract"].why.startswith(f"changed {name} (mine.py, line ")


def test_a_torch_that_lacks_a_newer_switch_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.6 has no precision of oneDNN's products."""
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace())
    with kept_state() as changed:
        pass
    assert changed == []


def test_several_changes_are_all_named(tmp_path: Path) -> None:
    fell, _ = in_one_process(tmp_path, "torch.set_default_dtype(torch.float64); os.chdir('/')")
    assert fell.answers["contract"].why.startswith("changed torch's default dtype, the working directory (mine.py")


def test_a_kernel_that_raises_leaves_nothing_behind_either(
    tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    body = "torch.set_flush_denormal(True); raise RuntimeError('out of luck')"
    crashed, later = in_one_process(tmp_path, body, "random")  # of a shape that every kernel takes
    assert crashed.met("runs") is False
    assert later == undisturbed


def test_a_variable_that_a_library_sets_as_it_is_imported_is_taken_back_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIEBREAK_TEST", raising=False)
    record, _ = in_one_process(tmp_path, "os.environ['TIEBREAK_TEST'] = '1'")
    assert record.met("contract")
    assert "TIEBREAK_TEST" not in os.environ


def generators() -> tuple[object, ...]:
    """The state of every global generator of random numbers."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize("seeding", ["torch.manual_seed(7)", "random.seed(7)", "numpy.random.seed(7)"])
def test_a_kernel_that_seeds_the_global_generators_is_within_its_rights(
    tmp_path: Path, undisturbed: list[tuple[object, ...]], seeding: str
) -> None:
    before = generators()
    record, later = in_one_process(tmp_path, seeding)
    assert record.outcome == HELD
    assert later == undisturbed
    assert generators() == before


NOISES = {
    "torch": "v = v * (1 + 0.01 * torch.rand(1).item())",
    "numpy": "v = v * (1 + 0.01 * numpy.random.rand())",
    "random": "v = v * (1 + 0.01 * random.random())",
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_kernel_of_global_random_numbers_repeats_in_any_order_and_not_within_a_cell(
    tmp_path: Path, noise: str
) -> None:
    # With a plan of its own, which is not looked for then.
    mine = replace(
        external_kernel(kernel_file(tmp_path, noise)), declaration=composed_kernel("flash@paper").declaration
    )
    cells = [Cell(CPU, mine, Call(CASES[name]), BF16) for name in ("random_odd", "random", "no_tail")]
    rounds = []
    for order in (cells, cells[::-1], cells[1:]):
        bench = Workbench(Settings(seed=1, heads=16))
        rounds.append({cell.id: summary(run_cell(cell, bench)) for cell in order})
        random.random(), np.random.rand(), torch.rand(3)  # as other tests of the same worker would
    assert rounds[0] == rounds[1]
    assert rounds[2].items() <= rounds[0].items()
    records = [run_cell(cell, Workbench(Settings(seed=1, heads=16))) for cell in cells]
    assert [record.met("repeatable") for record in records] == [False] * len(cells)
    assert {record.outcome for record in records} == {FELL}
    other = run_cell(cells[0], Workbench(Settings(seed=2, heads=16)))
    assert other.digest != records[0].digest


def test_random_numbers_from_a_seed_are_the_same_and_the_streams_go_on_as_before() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    undisturbed = [draw(), draw()]
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    draws = [draw()]
    inside = []
    for seed in (1, 1, 2**63):
        with own_randomness(seed):
            inside.append(draw())
    assert [*draws, draw()] == undisturbed
    assert inside[0] == inside[1] != inside[2]
