"""Captured tensors as cases of the matrix."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases import captured
from tiebreak.cases.captured import CapturedError, captured_cases, layer_checksum
from tiebreak.cases.case import Case
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import Verdict, judge
from tiebreak.kernels.features import BLIND_ROWS, COMMON
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.sampling import SequentialSampler
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import CRASHED, FELL, HELD, INCONCLUSIVE, MEASURED, Run

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]
Tensors = dict[str, Tensor]

CAUSAL: Mapping[str, str] = {"step": "7", "causal": "true"}
FULL: Mapping[str, str] = {"causal": "false"}
DOCS = Path(__file__).parents[2] / "docs" / "your-kernel.md"


def normal(shape: tuple[int, ...], key_heads: int | None = None, keys: int | None = None) -> Tensors:
    """One layer of normal q, k, v and dO, bf16."""
    rng = torch.Generator().manual_seed(sum(shape))
    batch, heads, tokens, d = shape
    key_shape = (batch, key_heads or heads, keys or tokens, d)
    shapes = {"q": shape, "k": key_shape, "v": key_shape, "do": shape}
    return {part: torch.randn(*size, generator=rng).bfloat16() for part, size in shapes.items()}


def keep(folder: Path, layers: Mapping[str, Tensors], step: str = "000007", metadata: Mapping[str, str] = FULL) -> Path:
    """One file of layers."""
    path = folder / f"inputs-{step}.safetensors"
    save_file({f"layer{n}.{part}": x for n, parts in layers.items() for part, x in parts.items()}, path, dict(metadata))
    return path


def only_case(folder: Path, tensors: Tensors, metadata: Mapping[str, str] = FULL) -> Case:
    folder.mkdir(exist_ok=True)
    keep(folder, {"0": tensors}, metadata=metadata)
    (case,) = captured_cases(folder)
    return case


def as_inputs(layer: Tensors, *, causal: bool = False) -> AttentionInputs:
    """A whole layer as one call."""
    q, k, v, do = (layer[part].float() for part in ("q", "k", "v", "do"))
    return AttentionInputs(q, k, v, do, Formats.of(BF16), causal=causal)


def scripted(name: str, heads: int) -> Tensors:
    """A scripted case's tensors, as a file keeps them."""
    inputs = next(case for case in SCRIPTED if case.name == name).make(1, 0, heads, BF16)
    return {part: getattr(inputs, part).bfloat16().contiguous() for part in ("q", "k", "v", "do")}


def sampled(case: Case, kernel: Kernel, heads: int = 256, fmt: Format = BF16) -> SequentialSampler:
    sampler = SequentialSampler(Cell(CPU, kernel, Call(case), fmt), Workbench(Settings(heads=heads)).case(case, fmt))
    sampler.draw()
    return sampler


class TestCases:
    def test_every_layer_of_every_file_is_one_in_order(self, tmp_path: Path) -> None:
        keep(tmp_path, {"10": normal((1, 2, 4, 8)), "2": normal((1, 2, 4, 8))}, "10")
        keep(tmp_path, {"0": normal((1, 2, 4, 8))}, "9")
        (tmp_path / "model.safetensors").write_text("weights, of no interest")
        assert [case.name for case in captured_cases(tmp_path)] == [
            "captured[step=9.layer=0]",
            "captured[step=10.layer=2]",
            "captured[step=10.layer=10]",
        ]

    def test_no_name_has_the_dash_of_ids_or_the_comma_of_lists(self, tmp_path: Path) -> None:
        assert not set("-,") & set(only_case(tmp_path, normal((1, 2, 4, 8))).name)

    def test_listing_them_reads_no_tensor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(captured, "_load", lambda layer: pytest.fail("read"))
        only_case(tmp_path, normal((1, 2, 4, 8)))

    @pytest.mark.parametrize("heads", [1, 5, 8, 24, 100])
    def test_batches_are_all_heads_once(self, tmp_path: Path, heads: int) -> None:
        layer = normal((3, 8, 4, 16), key_heads=2)
        case = only_case(tmp_path, layer)
        batches: list[AttentionInputs] = []
        while case.has(len(batches), heads):
            batches.append(case.make(1, len(batches), heads, BF16))
        sizes = [batch.q.shape[1] for batch in batches]
        assert all(size <= max(heads, 4) for size in sizes)
        assert len(set(sizes[:-1])) <= 1
        for part, ours in layer.items():
            assert torch.equal(torch.cat([getattr(batch, part)[0] for batch in batches]), ours.float().flatten(0, 1))

    def test_grouped_heads_keep_their_keys(self, tmp_path: Path) -> None:
        layer = normal((3, 8, 4, 16), key_heads=2)
        inputs = only_case(tmp_path, layer).make(1, 0, 24, BF16)
        whole = as_inputs(layer)
        assert torch.equal(reference(inputs).o[0], reference(whole).o.flatten(0, 1))

    @pytest.mark.parametrize("metadata", [CAUSAL, FULL], ids=["causal", "full"])
    @pytest.mark.parametrize("keys", [96, 130])
    def test_the_rows_used_are_what_they_were(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: Mapping[str, str], keys: int
    ) -> None:
        monkeypatch.setattr(captured, "_SCORES", 4 * 40 * keys)
        layer = normal((2, 2, 96, 16), keys=keys)
        inputs = only_case(tmp_path, layer, metadata).make(1, 0, 4, BF16)
        causal = metadata is CAUSAL
        assert inputs.causal is causal
        whole = as_inputs(layer, causal=causal)
        rows = inputs.q.shape[2]
        assert 32 <= rows < 96
        assert inputs.k.shape[2] == (rows + keys - 96 if causal else keys)
        expected = reference(whole).o.flatten(0, 1)[:, :rows]
        torch.testing.assert_close(reference(inputs).o[0], expected, rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("heads", [1, 12, 96, 4096])
    @pytest.mark.parametrize("tokens", [16, 1000, 8192])
    @pytest.mark.parametrize("groups", [1, 3])
    @pytest.mark.parametrize("causal", [False, True])
    def test_no_case_is_too_large_for_a_worker(self, heads: int, tokens: int, groups: int, causal: bool) -> None:
        all_heads = heads * groups
        used, rows, keys = captured._used(all_heads, groups, queries=tokens, keys=tokens, causal=causal)
        assert used % groups == 0
        assert groups <= used <= all_heads
        assert used * rows * keys <= captured._SCORES
        assert rows >= min(tokens, 32)
        if all_heads * tokens * tokens <= captured._SCORES:
            assert (used, rows, keys) == (all_heads, tokens, tokens)


class TestMetadata:
    def test_a_scale_is_that_of_the_scores(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8))
        inputs = only_case(tmp_path, layer, {**FULL, "scale": "0.5"}).make(1, 0, 2, BF16)
        assert inputs.scale == 0.5
        expected = (layer["q"].double() @ layer["k"].double().mT * 0.5).softmax(-1) @ layer["v"].double()
        torch.testing.assert_close(reference(inputs).o, expected)

    def test_a_layer_may_have_its_own(self, tmp_path: Path) -> None:
        metadata = {"layer0.causal": "true", "layer1.causal": "false", "layer1.scale": "0.5"}
        keep(tmp_path, {"0": normal((1, 2, 4, 8)), "1": normal((1, 2, 4, 8))}, metadata=metadata)
        inputs = [case.make(1, 0, 2, BF16) for case in captured_cases(tmp_path)]
        assert [(layer_inputs.causal, layer_inputs.softmax_scale) for layer_inputs in inputs] == [
            (True, None),
            (False, 0.5),
        ]

    def test_ranks_are_told_apart(self, tmp_path: Path) -> None:
        for step in ("2-rank10", "2-rank9", "1-rank10", "2"):
            keep(tmp_path, {"0": normal((1, 2, 4, 8))}, step)
        names = [case.name.removeprefix("captured") for case in captured_cases(tmp_path)]
        assert names == [
            "[step=1.rank=10.layer=0]", "[step=2.layer=0]", "[step=2.rank=9.layer=0]", "[step=2.rank=10.layer=0]",
        ]  # fmt: skip

    @pytest.mark.parametrize("edited", ["q", "k", "v", "do", "o", "causal", "scale"])
    def test_a_layer_that_was_changed_is_refused(self, tmp_path: Path, edited: str) -> None:
        layer = normal((1, 2, 4, 8)) | {"o": torch.zeros(1, 2, 4, 8)}
        metadata = {"causal": "false", "scale": "0.5", "layer0.crc32": layer_checksum(layer, False, 0.5)}
        path = keep(tmp_path, {"0": layer}, metadata=metadata)
        (case,) = captured_cases(tmp_path)
        assert case.make(1, 0, 2, BF16).scale == 0.5
        if edited in layer:
            layer[edited].view(-1)[-1] += 1
        keep(
            tmp_path,
            {"0": layer},
            metadata=metadata | {"causal": {"causal": "true"}, "scale": {"scale": "0.25"}}.get(edited, {}),
        )
        (case,) = captured_cases(tmp_path)
        captured._load.cache_clear()
        with pytest.raises(CapturedError, match=rf"^{path}: layer0 is not what was captured: its checksum differs; "):
            case.make(1, 0, 2, BF16)


class TestVersion:
    def test_is_of_the_values_alone(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8))
        wide = {part: tensor.float() for part, tensor in layer.items()}
        assert only_case(tmp_path / "a", layer).version == only_case(tmp_path / "b", wide).version

    @pytest.mark.parametrize("part", ["q", "k", "v", "do"])
    def test_tells_one_value(self, tmp_path: Path, part: str) -> None:
        layer = normal((1, 2, 4, 8))
        other = {name: tensor.clone() for name, tensor in layer.items()}
        other[part][0, 1, 3, 7] += 1
        assert only_case(tmp_path / "a", layer).version != only_case(tmp_path / "b", other).version

    def test_tells_the_mask(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8))
        assert only_case(tmp_path / "a", layer).version != only_case(tmp_path / "b", layer, CAUSAL).version

    def test_is_that_of_the_record(self, tmp_path: Path) -> None:
        case = only_case(tmp_path, normal((1, 2, 4, 8)))
        record = run_cell(Cell(EMULATION, composed_kernel("standard"), Call(case), BF16), Workbench(Settings()))
        assert record.case_version == case.version > 1

    def test_a_file_that_is_gone_crashes_its_cell_alone(self, tmp_path: Path) -> None:
        case = only_case(tmp_path, normal((1, 2, 4, 8)))
        (tmp_path / "inputs-000007.safetensors").unlink()
        record = run_cell(Cell(EMULATION, composed_kernel("standard"), Call(case), BF16), Workbench(Settings()))
        assert (record.outcome, record.case_version) == (CRASHED, 0)
        assert re.search(r"CapturedError: .*inputs-000007.safetensors: cannot be read", record.reasons[0])


def truncating(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
    """Attention whose last cast drops bits: half an ulp toward zero in every element."""
    del arithmetic, gradients
    exact = reference(inputs).o.float()
    return AttentionOutput((exact.view(torch.int32) & -65536).view(torch.float32))


class TestLooks:
    @pytest.mark.parametrize(("heads", "in_all"), [(16, 40), (32, 40), (256, 40), (1, 8)])
    def test_heads_are_counted_once_and_as_many_as_there_are(self, tmp_path: Path, heads: int, in_all: int) -> None:
        # One row of two elements a head: nothing settles.
        case = only_case(tmp_path, normal((10, 4, 1, 2), keys=8))
        sampler = sampled(case, composed_kernel("flash@paper"), heads)
        assert judge(sampler.sample.errors.bias) is Verdict.INCONCLUSIVE
        assert sampler.sample.heads == in_all
        assert sampler.sample.errors.elements == in_all * 2
        assert sampler.exhausted is (in_all == 40)

    def test_they_stop_when_all_is_settled(self, tmp_path: Path) -> None:
        sampler = sampled(only_case(tmp_path, scripted("tied_maxima[k=2]", 64)), composed_kernel("flash@paper"), 16)
        assert sampler.sample.heads < 64

    def test_a_scripted_input_is_measured_as_ever(self, tmp_path: Path) -> None:
        made = next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]")
        sample = sampled(only_case(tmp_path, scripted(made.name, 64)), composed_kernel("flash@paper")).sample
        bench = Workbench(Settings(heads=64)).case(made, BF16)
        batch = bench.batch(0)
        output = CPU.run(composed_kernel("flash@paper"), batch.inputs, gradients=False)
        direct = bench.measure(0, output, sample.declaration)
        assert torch.equal(sample.errors.head_bias, direct.head_bias)
        assert sample.errors.bias.mean > 0.2

    def test_cancelled_elements_do_not_hide_a_bias(self, tmp_path: Path) -> None:
        layer = normal((2, 8, 48, 32))
        kernel = Kernel("truncating", truncating, None, takes=COMMON)
        case = only_case(tmp_path, layer, CAUSAL)
        sampler = sampled(case, kernel)
        assert sampler.sample.errors.bias.beyond(0.4)
        assert -0.55 < sampler.sample.errors.bias.mean < -0.4
        assert sampler.sample.errors.max_ulps <= 1
        inputs = case.make(1, 0, 256, BF16)
        ref = reference(inputs)
        large = ref.o.abs() >= 0.25 * ref.magnitude
        assert sampler.sample.errors.left_out == (~large).sum() > 1000

    def test_cancelled_elements_are_not_in_the_root_mean_square(self, tmp_path: Path) -> None:
        # Errors that are in proportion to sum P |V|: in ulps of a cancelled O they are of any size.
        sampler = sampled(only_case(tmp_path, normal((2, 8, 48, 32)), CAUSAL), composed_kernel("flash@paper"))
        assert 0.3 < sampler.sample.errors.rms_ulps < 1
        assert sampler.sample.errors.max_ulps < 8

    def test_cancelled_elements_are_still_held_to_the_bound(self, tmp_path: Path) -> None:
        def wrong(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
            del arithmetic, gradients
            ref = reference(inputs)
            cancelled = ref.o.abs() < 0.25 * ref.magnitude
            return AttentionOutput(torch.where(cancelled, ref.o + 10 * ref.magnitude, ref.o).bfloat16().float())

        cell = Cell(
            CPU, Kernel("wrong", wrong, None, takes=COMMON), Call(only_case(tmp_path, normal((1, 4, 16, 8)))), BF16
        )
        record = run_cell(cell, Workbench(Settings()))
        assert record.outcome == FELL
        assert "times the bound" in record.reasons[0]

    def test_the_remedy_is_not_to_raise_what_cannot_help(self, tmp_path: Path) -> None:
        layer = normal((10, 4, 1, 2), keys=8)
        case = only_case(tmp_path, layer)
        assert sampled(case, composed_kernel("flash@paper"), 1).remedy.endswith("would do, about")
        assert sampled(case, composed_kernel("flash@paper"), 256).remedy.startswith("the case has no more")
        opposed = layer | {"k": torch.zeros_like(layer["k"]), "v": torch.ones_like(layer["v"])}
        opposed["v"][:, :, ::2] = -1.015625
        cancelling = only_case(tmp_path / "gone", opposed)
        gone = sampled(cancelling, composed_kernel("flash@paper"))
        assert gone.remedy.startswith("every element of O has cancelled")
        assert gone.sample.prediction_met is None
        undeclared = Kernel("truncating", truncating, None, takes=COMMON)
        assert sampled(case, undeclared).fits
        assert sampled(cancelling, undeclared).fits == {}


class TestFormats:
    def test_16_bits_run_as_they_are(self, tmp_path: Path) -> None:
        layer = {part: tensor.half() for part, tensor in normal((1, 2, 4, 8)).items()}
        case = only_case(tmp_path, layer)
        assert case.fixed_heads is not None
        assert case.fixed_heads.formats == (FP16,)
        assert torch.equal(case.make(1, 0, 2, FP16).q[0], layer["q"][0].float())

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=["bf16", "fp16"])
    def test_fp32_is_rounded(self, tmp_path: Path, fmt: Format) -> None:
        layer = {part: tensor.float() * 1.001 for part, tensor in normal((1, 2, 4, 8)).items()}
        inputs = only_case(tmp_path, layer).make(1, 0, 2, fmt)
        dtype = torch.bfloat16 if fmt == BF16 else torch.float16
        assert inputs.formats == Formats.of(fmt)
        for part, tensor in layer.items():
            assert torch.equal(getattr(inputs, part)[0], tensor[0].to(dtype).float())

    def test_do_alone_may_be_wider(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8))
        layer["do"] = layer["do"].float() * 1.001
        inputs = only_case(tmp_path, layer).make(1, 0, 2, BF16)
        assert torch.equal(inputs.do[0], layer["do"][0].bfloat16().float())


TEST_KERNELS = """
import torch

def exact(q, k, v, *, causal=False, scale=None):
    s = q.double() @ k.double().mT * scale
    return (s.softmax(-1) @ v.double()).to(q.dtype)

def unfused(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return ((p.to(q.dtype) @ v) / p.sum(-1, keepdim=True)).to(q.dtype)
"""


class TestRuns:
    def test_the_captured_cases_run_alone(self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept) -> None:
        keep(pytester.path, {"0": scripted("tied_maxima[k=2]", 256), "1": normal((1, 12, 32, 16))})
        words = ("--captured", ".", "--backend", "emulation", "--kernels", "flash@paper,fair")
        result = matrix(*words)
        assert result.ret == 0
        records = {(record.case, record.kernel): record for record in kept().records}
        assert len(records) == 4
        assert {record.outcome for record in records.values()} == {MEASURED}  # nothing is claimed of captured tensors
        tied = "captured[step=000007.layer=0]"
        assert records[tied, "flash@paper"].verdict == "biased"
        assert records[tied, "fair"].verdict == "unbiased"
        assert [records[tied, "fair"].heads, records["captured[step=000007.layer=1]", "fair"].heads] == [256, 12]
        assert kept().options["captured"] == "."

    def test_with_cases_both_are_named(self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept) -> None:
        keep(pytester.path, {"0": normal((1, 12, 32, 16)), "1": normal((1, 12, 32, 16))})
        words = ("--captured", ".", "--backend", "emulation", "--kernels", "fair")
        assert matrix(*words, "--cases", "captured[*.layer=1],random", "--heads", "64").ret == 0
        assert {record.case for record in kept().records} == {"captured[step=000007.layer=1]", "random"}

    def test_the_command_reruns_the_cell(self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept) -> None:
        keep(pytester.path, {"0": normal((1, 12, 32, 16)), "1": normal((1, 12, 32, 16))})
        matrix("--captured", "./", "--backend", "emulation", "--kernels", "fair,standard")
        record = kept().records[1]
        assert re.search(r"--captured \.", record.command)
        _, words = record.command.split(" tiebreak.matrix ")
        matrix(*shlex.split(words), "--save", "again")
        assert kept("again").records == (record,)

    def test_workers_find_the_same(self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept) -> None:
        keep(pytester.path, {"0": normal((1, 12, 32, 16)), "1": normal((1, 12, 32, 16))})
        words = ("--captured", ".", "--kernels", "fair")
        for workers in ("0", "1"):
            assert matrix(*words, "-n", workers, "--save", f"n{workers}").ret == 0
        assert kept("n0").records == kept("n1").records

    @pytest.mark.parametrize(("kernel", "outcome"), [("exact", HELD), ("unfused", FELL)])
    def test_fair_holds_a_users_kernel_to_no_bias(
        self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept, kernel: str, outcome: str
    ) -> None:
        pytester.path.joinpath("mine.py").write_text(TEST_KERNELS)
        keep(pytester.path, {"0": scripted("tied_maxima[k=2]", 256)})
        matrix("--captured", ".", "--kernel", f"mine.py:{kernel}", "--fair")
        (record,) = kept().records
        assert record.outcome == outcome

    def test_layers_of_two_formats_run_in_their_own(
        self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept
    ) -> None:
        wide = {part: tensor.float() for part, tensor in normal((1, 12, 32, 16)).items()}
        keep(pytester.path, {"0": normal((1, 12, 32, 16)), "1": wide})
        words = ("--captured", ".", "--backend", "emulation", "--kernels", "standard", "--dtype", "bf16,fp16")
        assert matrix(*words).ret == 0
        formats = sorted((record.case[-2], record.format) for record in kept().records)
        assert formats == [("0", "bf16"), ("1", "bf16"), ("1", "fp16")]

    def test_fair_does_not_pass_what_the_heads_do_not_tell(
        self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept
    ) -> None:
        pytester.path.joinpath("mine.py").write_text(TEST_KERNELS)
        keep(pytester.path, {"0": normal((1, 4, 1, 2), keys=8)})
        assert matrix("--captured", ".", "--kernel", "mine.py:exact", "--fair").ret == 1
        (record,) = kept().records
        assert (record.outcome, record.heads) == (INCONCLUSIVE, 4)
        assert record.reasons[0].startswith("4 heads do not settle the claim: unbiased")


def _without(part: str) -> Tensors:
    return {name: tensor for name, tensor in normal((1, 2, 4, 8)).items() if name != part}


def _with(part: str, tensor: Tensor) -> Tensors:
    return normal((1, 2, 4, 8)) | {part: tensor}


def _poisoned(value: float) -> Tensors:
    layer = normal((1, 2, 4, 8))
    layer["v"][0, 1, 2, 3] = value
    return layer


class TestBadFiles:
    """Exit code 2, one line that names the file and the key, and nothing written."""

    LAYERS: Mapping[str, tuple[Tensors, str]] = {
        "missing key": (_without("v"), r"layer3\.v is missing$"),
        "no layers": ({"w": torch.zeros(1)}, r"no layers; expected keys such as layer0\.q$"),
        "mixed formats": (_with("k", torch.zeros(1, 2, 4, 8)), r"layer3\.q BF16, layer3\.k F32, .*BF16, F16, F32 .*"),
        "dO in another format of 16 bits": (
            _with("do", torch.zeros(1, 2, 4, 8).half()),
            r"layer3\.q BF16, .*layer3\.do F16; expected .*",
        ),
        "other format": (
            {part: tensor.double() for part, tensor in normal((1, 2, 4, 8)).items()},
            r"layer3\.q F64, .*expected one of BF16, F16, F32 for all four, or.*",
        ),
        "3 dimensions": (_with("q", torch.zeros(2, 4, 8).bfloat16()), r"layer3\.q \(2, 4, 8\), .*\(batch, heads, .*"),
        "empty": (normal((1, 2, 0, 8)), r"layer3\.q \(1, 2, 0, 8\), .*none of them 0$"),
        "dO of another shape": (_with("do", torch.zeros(1, 2, 5, 8).bfloat16()), r"layer3\.q .*dO \(1, 2, 5, 8\) .*"),
        "v of another shape": (_with("v", torch.zeros(1, 2, 5, 8).bfloat16()), r"layer3\.q .*do not fit$"),
        "heads": (
            _with("k", torch.zeros(1, 3, 4, 8).bfloat16()) | {"v": torch.zeros(1, 3, 4, 8).bfloat16()},
            r"layer3\.q .*2 query heads are no multiple of 3 key heads$",
        ),
        "more queries than keys": (normal((1, 2, 4, 8), keys=3), r"layer3\.q .*more queries than keys.*"),
        "NaN": (_poisoned(torch.nan), r"layer3\.v holds NaN or Inf; leave .*--cases$"),
        "Inf": (_poisoned(torch.inf), r"layer3\.v holds NaN or Inf; leave .*--cases$"),
    }

    def refused(self, matrix: MatrixRun, pytester: pytest.Pytester, message: str, *words: str) -> None:
        before = sorted(pytester.path.rglob("*"))
        folder = () if "--captured" in words else ("--captured", ".")
        result = matrix(*folder, "--backend", "emulation", "--kernels", "standard", *words)
        assert result.ret == 2
        lines = [line for line in (*result.outlines, *result.errlines) if "Exit: " in line or "Error" in line]
        assert len(lines) == 1, lines
        assert re.search(message, lines[0]), lines[0]
        assert sorted(pytester.path.rglob("*")) == before

    @pytest.mark.parametrize(("layer", "message"), LAYERS.values(), ids=LAYERS)
    def test_layers(self, matrix: MatrixRun, pytester: pytest.Pytester, layer: Tensors, message: str) -> None:
        number = "3" if "w" not in layer else "s"
        keep(pytester.path, {number: layer}, metadata=CAUSAL)
        self.refused(matrix, pytester, f"Exit: inputs-000007.safetensors: {message}")

    def test_a_file_cut_short(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        path = keep(pytester.path, {"3": normal((1, 2, 4, 8))})
        path.write_bytes(path.read_bytes()[:-1])
        self.refused(matrix, pytester, "Exit: inputs-000007.safetensors: cannot be read as safetensors: .+")

    @pytest.mark.parametrize("content", [b"", b"not at all"])
    def test_no_safetensors(self, matrix: MatrixRun, pytester: pytest.Pytester, content: bytes) -> None:
        pytester.path.joinpath("inputs-1.safetensors").write_bytes(content)
        self.refused(matrix, pytester, "Exit: inputs-1.safetensors: cannot be read as safetensors: .+")

    def test_a_folder_of_that_name(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        pytester.path.joinpath("inputs-1.safetensors").mkdir()
        self.refused(matrix, pytester, "Exit: inputs-1.safetensors: cannot be read as safetensors: .+")

    @pytest.mark.parametrize("causal", [{}, {"causal": "yes"}], ids=["missing", "yes"])
    def test_a_mask_that_is_not_told(
        self, matrix: MatrixRun, pytester: pytest.Pytester, causal: Mapping[str, str]
    ) -> None:
        keep(pytester.path, {"3": normal((1, 2, 4, 8))}, metadata={"step": "7", **causal})
        self.refused(matrix, pytester, "metadata causal is (missing|yes); expected true or false$")

    def test_a_changed_layer(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        keep(pytester.path, {"3": normal((1, 2, 4, 8))}, metadata={**FULL, "layer3.crc32": "00000000"})
        self.refused(matrix, pytester, r"layer3 is not what was captured: its checksum differs; capture it anew.*")

    @pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf", "one"])
    def test_a_scale_that_is_none(self, matrix: MatrixRun, pytester: pytest.Pytester, scale: str) -> None:
        keep(pytester.path, {"3": normal((1, 2, 4, 8))}, metadata={**FULL, "scale": scale})
        self.refused(matrix, pytester, f"metadata scale is {scale}; expected a positive number")

    def test_no_files(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        self.refused(matrix, pytester, r"--captured \.: no file in it is called inputs-STEP\.safetensors.*")

    def test_no_folder(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        self.refused(matrix, pytester, r"--captured nosuch: no such folder$", "--captured", "nosuch")

    def test_a_format_that_is_not_run(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        keep(pytester.path, {"3": {part: tensor.half() for part, tensor in normal((1, 2, 4, 8)).items()}})
        self.refused(matrix, pytester, r"--dtype bf16: captured\[step=000007\.layer=3\] is in fp16; add that, or .*")

    def test_values_beyond_the_format(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        keep(pytester.path, {"3": {part: tensor.float() * 1e5 for part, tensor in normal((1, 2, 4, 8)).items()}})
        self.refused(matrix, pytester, r"layer3\.q holds values beyond fp16; .*", "--dtype", "bf16,fp16")

    def test_a_tensor_that_is_not_run_may_hold_nan(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        keep(pytester.path, {"3": _poisoned(torch.nan), "4": normal((1, 12, 32, 16))})
        words = ("--captured", ".", "--backend", "emulation", "--kernels", "standard")
        assert matrix(*words, "--cases", "captured[*.layer=4]").ret == 0

    def test_safetensors_is_named_where_it_lacks(
        self, matrix: MatrixRun, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep(pytester.path, {"3": normal((1, 2, 4, 8))})
        monkeypatch.setitem(sys.modules, "safetensors", None)
        self.refused(matrix, pytester, "--captured reads safetensors files: pip install safetensors$")


def test_the_documented_example_is_a_case(pytester: pytest.Pytester) -> None:
    _, _, section = DOCS.read_text(encoding="utf-8").partition("\n### The format\n")
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {})
    (case,) = captured_cases(pytester.path)
    assert case.name == "captured[step=000001.layer=0]"
    inputs = case.make(1, 0, 16, BF16)
    assert inputs.q.shape == (1, 16, 64, 32)
    assert inputs.causal
    assert bool((inputs.do != 0).any())


class TestMade:
    """A layer that says it is made; what comes back of one is the fuzz's to test."""

    MADE: Mapping[str, str] = {"causal": "true", "layer0.made": "true"}

    @pytest.mark.parametrize(
        ("metadata", "padding", "message"),
        [
            ({"layer0.order": "nhbd"}, None, "metadata layer0.order is nhbd; expected one of bhnd, bnhd, bhdn"),
            ({}, torch.ones(2, 4, dtype=torch.uint8), r"layer0.key_padding \[2, 4\]; expected \[4\], a number a key"),
        ],
        ids=["order", "padding"],
    )
    def test_what_it_says_has_to_fit(
        self, tmp_path: Path, metadata: Mapping[str, str], padding: Tensor | None, message: str
    ) -> None:
        layer = normal((1, 2, 4, 8)) | ({} if padding is None else {"key_padding": padding})
        with pytest.raises(CapturedError, match=message):
            only_case(tmp_path, layer, {**self.MADE, **metadata})

    def test_only_such_a_layer_may_hold_nan_and_rows_without_a_key(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8), keys=2)
        layer["v"][0, 0, 0, 0] = torch.nan
        case = only_case(tmp_path / "made", layer, self.MADE)
        assert case.gradients
        assert BLIND_ROWS in case.make(1, 0, 256, BF16).asks()
        with pytest.raises(CapturedError, match="leaves the first of more queries than keys without a key"):
            only_case(tmp_path / "queries", layer, CAUSAL)
        with pytest.raises(CapturedError, match="holds NaN or Inf"):
            only_case(tmp_path / "nan", layer, FULL).make(1, 0, 256, BF16)
        first, second = (
            only_case(tmp_path / order, layer, {**self.MADE, "layer0.order": order}) for order in ("bhnd", "bnhd")
        )
        assert first.version != second.version
