"""A kernel under test that changes its process: it fails for it, and no other cell has anything of it."""

import os
import random
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.kernels.external import external_kernel, isolation
from tiebreak.kernels.external.isolation import kept_state
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import contract
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.contract import Contract
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import FAILED, PASSED, Record
from tiebreak.studies.cells import CASES, judged

PLAIN = """
import os
import random
from contextlib import ExitStack

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention

KEPT = ExitStack()


def attention(q, k, v, *, causal=False, scale=None):
    {body}
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""
KEPT = ExitStack()  # what a kernel enters and holds on to: let go of, an inference mode ends
# What a kernel does, and what a broken contract calls it. With a plain mode of either kind nothing of torch's runs.
CHANGES: Mapping[str, str] = {
    "torch.overrides.TorchFunctionMode().__enter__()": "a function mode of torch's",
    "torch.utils._python_dispatch.TorchDispatchMode().__enter__()": "a dispatch mode of torch's",
    "torch.set_flush_denormal(True)": "torch's flushing of subnormals",
    "torch.set_default_dtype(torch.float64)": "torch's default dtype",
    "torch.device('meta').__enter__()": "torch's default device",
    "torch.set_default_device('meta')": "torch's default device",
    "torch.set_num_threads(torch.get_num_threads() + 2)": "torch's number of threads",
    "torch.set_grad_enabled(not torch.is_grad_enabled())": "torch's grad mode",
    "KEPT.enter_context(torch.inference_mode())": "torch's inference mode",
    "torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg).__enter__()": "torch's hooks of saved tensors",
    "torch.autograd.set_detect_anomaly(True)": "torch's detection of anomalies",
    "torch.autocast('cpu', torch.bfloat16).__enter__()": "torch's autocast",
    "torch.autocast_increment_nesting()": "torch's autocast",
    "torch.set_autocast_dtype('cpu', torch.float16)": "torch's autocast",
    "torch.set_deterministic_debug_mode('error')": "torch's deterministic algorithms",
    "torch.set_deterministic_debug_mode('warn')": "torch's deterministic algorithms",
    "torch.utils.deterministic.fill_uninitialized_memory = False": "torch's deterministic algorithms",
    "torch.set_float32_matmul_precision('medium')": "torch's precision of fp32 products",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": "torch's precision of fp32 products",
    "torch.backends.fp32_precision = 'tf32'": "torch's precision of fp32 products",
    "torch.backends.mkldnn.enabled = False": "torch's use of oneDNN",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": "torch's sums of 16-bit products",
    "torch.backends.cuda.enable_flash_sdp(False)": "torch's choice of attention kernels",
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)": "torch's choice of attention kernels",
    "os.environ.pop('PATH')": "the environment",
    "os.environ['PATH'] = '/'": "the environment",
    "os.chdir('/')": "the working directory",
}
# After what was changed: a kernel of torch's own, a composed one on the device, and the suite's own arithmetic; a tie,
# and values so small that a device that flushes loses them.
LATER = [
    *((CPU, CPU.kernel("sdpa_flash"), case) for case in ("tied_maxima[k=2]", "subnormal_v")),
    *((backend, composed_kernel("flash@paper"), "subnormal_v") for backend in (CPU, EMULATION)),
]


def kernel_file(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(PLAIN.format(body=body), encoding="utf-8")
    return f"{folder / 'mine.py'}:attention"


def summary(record: Record) -> tuple[object, ...]:
    """The parts of a record that do not depend on the cells before it."""
    return record.id, record.outcome, record.digest, record.measures, record.answers


def in_one_process(folder: Path, body: str) -> tuple[Record, list[tuple[object, ...]]]:
    """The record of a kernel that does something first, and of the cells after it."""
    bench, mine = Workbench(Settings(seed=1, heads=16)), external_kernel(kernel_file(folder, body))
    first = judged(mine, "random_odd", bench=bench)
    return first, [summary(judged(kernel, case, backend=backend, bench=bench)) for backend, kernel, case in LATER]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    first, later = in_one_process(tmp_path_factory.mktemp("sound"), "pass")
    assert first.outcome == PASSED
    assert first.passed("contract")
    return later


def state() -> list[object]:
    return [get() for _, get, _ in isolation._SWITCHES]


def test_every_switch_is_tried() -> None:
    assert {name for name, *_ in isolation._SWITCHES} == set(CHANGES.values())


@pytest.mark.parametrize(("body", "name"), CHANGES.items(), ids=CHANGES)
def test_a_switch_is_put_back_after_an_error_too_and_told(body: str, name: str) -> None:
    before = state()
    with suppress(RuntimeError), kept_state() as changed:
        exec(body, {"torch": torch, "os": os, "KEPT": KEPT})
        raise RuntimeError("out of luck")
    assert changed == [name]
    assert state() == before


def test_a_kernel_that_changes_its_process_fails_and_takes_no_other_cell_with_it(
    tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    before = state()
    attend = "o = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)"  # before autocast is left on
    failed, later = in_one_process(tmp_path, "; ".join([attend, *list(CHANGES)[::-1], "return o"]))
    assert later == undisturbed
    assert state() == before
    assert failed.outcome == FAILED
    assert list(failed.answers) == ["contract"]
    names = dict.fromkeys(name for name, *_ in isolation._SWITCHES)
    del names["torch's grad mode"]  # the inference mode was entered after it had been changed, and takes it along
    assert failed.answers["contract"].why.startswith(f"changed {', '.join(names)} (mine.py, line ")


def test_a_torch_that_lacks_a_newer_switch_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.6 has no precision of oneDNN's products."""
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace())
    with kept_state() as changed:
        pass
    assert changed == []


def test_a_variable_that_a_library_sets_as_it_is_imported_is_taken_back_and_no_fault() -> None:
    with kept_state() as changed:
        os.environ["TIEBREAK_TEST"] = "1"
    assert changed == []
    assert "TIEBREAK_TEST" not in os.environ


def generators() -> tuple[object, ...]:
    """The state of every global generator of random numbers."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def test_a_kernel_that_seeds_the_global_generators_is_within_its_rights(
    tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    before = generators()
    record, later = in_one_process(tmp_path, "torch.manual_seed(7); random.seed(7); numpy.random.seed(7)")
    assert record.outcome == PASSED
    assert later == undisturbed
    assert generators() == before


def test_a_kernel_of_global_random_numbers_repeats_in_any_order_and_not_within_a_cell(tmp_path: Path) -> None:
    noise = "v = v * (1 + 0.01 * (torch.rand(1).item() + numpy.random.rand() + random.random()))"
    mine = external_kernel(kernel_file(tmp_path, noise), "paper")  # which is not looked for then
    cells = [Cell(CPU, mine, each, BF16) for each in (OneCall(CASES["random_odd"]), *map(Contract, contract.CASES[:2]))]
    rounds = []
    for order in (cells, cells[::-1], cells[1:]):
        bench = Workbench(Settings(seed=1, heads=16))
        records = {cell.id: run_cell(cell, bench) for cell in order}
        rounds.append({name: summary(record) for name, record in records.items()})
        random.random(), np.random.rand(), torch.rand(3)  # as other tests of the same worker would
        assert all(record.passed("repeatable") is False for name, record in records.items() if "contract" in name)
    assert rounds[0] == rounds[1]
    assert rounds[2].items() <= rounds[0].items()
    other = run_cell(cells[0], Workbench(Settings(seed=2**63, heads=16)))
    assert other.digest != rounds[0][cells[0].id][2]
