"""Captured tensors as cases of the matrix."""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases import captured
from tiebreak.cases.captured import CapturedError, captured_cases
from tiebreak.cases.case import Case
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import BiasVerdict, judge
from tiebreak.defects.kernel import SOUND
from tiebreak.defects.planted import on, users
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import call
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.sample import Sample
from tiebreak.matrix.workbench import Settings, Settled, Workbench
from tiebreak.reports.records.record import CAPTURED, CRASHED, MEASURED, Run
from tiebreak.studies.cells import judged

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


def sampled(case: Case, kernel: Kernel, heads: int = 256, fmt: Format = BF16) -> Sample:
    bench = Workbench(Settings(heads=heads)).case(case, fmt)
    return call._until_settled(Cell(CPU, kernel, OneCall(case), fmt), bench, Settled("nothing"))


class TestCases:
    def test_every_layer_of_every_file_is_one_in_order_and_no_tensor_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(captured, "_load", lambda layer: pytest.fail("read"))
        keep(tmp_path, {"10": normal((1, 2, 4, 8)), "2": normal((1, 2, 4, 8))}, "10")
        for step in ("9", "2-rank10", "2-rank9"):
            keep(tmp_path, {"0": normal((1, 2, 4, 8))}, step)
        (tmp_path / "model.safetensors").write_text("weights, of no interest")
        names = [case.name.removeprefix("captured") for case in captured_cases(tmp_path)]
        assert names == [
            *("[step=2.rank=9.layer=0]", "[step=2.rank=10.layer=0]", "[step=9.layer=0]"),
            *("[step=10.layer=2]", "[step=10.layer=10]"),
        ]

    @pytest.mark.parametrize("heads", [1, 5, 100])
    def test_batches_are_all_heads_once_with_their_keys(self, tmp_path: Path, heads: int) -> None:
        layer = normal((3, 8, 4, 16), key_heads=2)
        case = only_case(tmp_path, layer)
        batches: list[AttentionInputs] = []
        while case.has_batch(len(batches), heads):
            batches.append(case.make(1, len(batches), heads, BF16))
        assert all(batch.q.shape[1] <= max(heads, 4) for batch in batches)
        assert (batches[0].q.shape == layer["q"].shape) is (heads >= 24), "a call in its own shape, if it fits"
        for part, ours in layer.items():
            parts = [getattr(batch, part).flatten(0, 1) for batch in batches]
            assert torch.equal(torch.cat(parts), ours.float().flatten(0, 1))
        outputs = torch.cat([reference(batch).o.flatten(0, 1) for batch in batches])
        assert torch.equal(outputs, reference(as_inputs(layer)).o.flatten(0, 1))

    @pytest.mark.parametrize("heads", [2, 4, 8])
    def test_each_entry_of_the_batch_keeps_its_own_padding(self, tmp_path: Path, heads: int) -> None:
        layer, padding = normal((2, 4, 4, 8), key_heads=2), torch.ones(2, 4, dtype=torch.uint8)
        padding[1, 1:] = 0
        case = only_case(tmp_path, layer | {"key_padding": padding})
        batches = [case.make(1, index, heads, BF16) for index in range(8 // heads)]
        o = torch.cat([reference(batch).o.flatten(0, 1) for batch in batches])
        alone = layer["v"][1, :, :1].double().repeat_interleave(2, 0).expand(-1, 4, -1)
        assert torch.equal(o[4:], alone), "the rows of the second entry see one key"
        assert not torch.equal(o[:1], layer["v"][:1, 0, :1].double().expand(-1, 4, -1))

    @pytest.mark.parametrize(("metadata", "keys"), [(CAUSAL, 96), (CAUSAL, 130), (FULL, 130)])
    def test_the_rows_used_are_what_they_were(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: Mapping[str, str], keys: int
    ) -> None:
        monkeypatch.setattr(captured, "_SCORES", 4 * 40 * keys)
        layer = normal((2, 2, 96, 16), keys=keys)
        case = only_case(tmp_path, layer, metadata)
        inputs = case.make(1, 0, 4, BF16)
        assert case.fixed_heads is not None
        assert f"{96 - inputs.q.shape[2]} queries of 96" in case.fixed_heads.cut
        causal = metadata is CAUSAL
        assert inputs.causal is causal
        whole = as_inputs(layer, causal=causal)
        rows = inputs.q.shape[2]
        assert 32 <= rows < 96
        assert inputs.k.shape[2] == (rows + keys - 96 if causal else keys)
        torch.testing.assert_close(reference(inputs).o, reference(whole).o[:, :, :rows], rtol=1e-13, atol=1e-13)

    def test_no_case_is_too_large_for_a_worker(self) -> None:
        for heads, tokens, groups, causal in product((1, 12, 4096), (16, 1000, 8192), (1, 3), (False, True)):
            all_heads = heads * groups
            part, cut = captured.used_part(1, all_heads, groups, queries=tokens, keys=tokens, causal=causal)
            entries, used, rows, keys = part
            assert entries == 1
            assert bool(cut) == (part != (1, all_heads, tokens, tokens))
            assert used % groups == 0
            assert groups <= used <= all_heads
            assert used * rows * keys <= captured._SCORES
            assert rows >= min(tokens, 32)
            if all_heads * tokens * tokens <= captured._SCORES:
                assert (used, rows, keys) == (all_heads, tokens, tokens)

    def test_a_scale_is_that_of_the_scores_and_a_layer_may_have_its_own(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8))
        metadata = {"layer0.causal": "true", "layer1.causal": "false", "layer1.scale": "0.5"}
        keep(tmp_path, {"0": normal((1, 2, 4, 8)), "1": layer}, metadata=metadata)
        first, second = (case.make(1, 0, 2, BF16) for case in captured_cases(tmp_path))
        assert (first.causal, first.softmax_scale, second.causal, second.scale) == (True, None, False, 0.5)

    def test_the_version_is_of_all_values_and_the_mask_alone(self, tmp_path: Path) -> None:
        layer = normal((1, 2, 4, 8))
        version = only_case(tmp_path, layer).version
        assert version == only_case(tmp_path / "wide", {part: x.float() for part, x in layer.items()}).version
        assert version != only_case(tmp_path / "mask", layer, CAUSAL).version
        for part in layer:
            other = {name: tensor.clone() for name, tensor in layer.items()}
            other[part][0, 1, 3, 7] += 1
            assert version != only_case(tmp_path / part, other).version

    def test_a_file_that_is_gone_crashes_its_cell_alone(self, tmp_path: Path) -> None:
        case = only_case(tmp_path, normal((1, 2, 4, 8)))
        (tmp_path / "inputs-000007.safetensors").unlink()
        record = judged(composed_kernel("standard"), case, backend=EMULATION)
        assert (record.outcome, record.case_version) == (CRASHED, 0)
        assert re.search(r"CapturedError: .*inputs-000007.safetensors: cannot be read", record.reasons[0])


def truncating(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
    """Attention whose last cast drops bits: half an ulp toward zero in every element."""
    del arithmetic, gradients
    exact = reference(inputs).o.float()
    return AttentionOutput((exact.view(torch.int32) & -65536).view(torch.float32))


TRUNCATING = Kernel("truncating", truncating, None, takes=COMMON)


class TestLooks:
    @pytest.mark.parametrize(("heads", "in_all"), [(16, 40), (256, 40), (1, 8)])
    def test_heads_are_counted_once_and_as_many_as_there_are(self, tmp_path: Path, heads: int, in_all: int) -> None:
        # One row of two elements a head: nothing settles.
        case = only_case(tmp_path, normal((10, 4, 1, 2), keys=8))
        sample = sampled(case, composed_kernel("flash@paper"), heads)
        assert judge(sample.errors.bias) is BiasVerdict.UNDECIDED
        assert sample.heads == in_all
        assert sample.errors.elements == in_all * 2
        assert sample.exhausted is (in_all == 40)

    @pytest.mark.parametrize(
        ("changes", "passed"),
        [
            ({}, True),
            ({"dk": lambda sound, request, ds: sound(request, ds) / request.factor}, False),
            ({"dk": lambda sound, request, ds: 1.25 * sound(request, ds)}, False),  # within every bound
            ({"gradients": lambda sound, request, do, o: sound(request, torch.ones_like(do), o)}, False),
        ],
        ids=["sound", "dK unscaled", "dK x 1.25", "dO ignored"],
    )
    def test_a_backward_pass_is_held_to_the_do_that_was_kept(
        self, tmp_path: Path, changes: Mapping[str, Any], passed: bool
    ) -> None:
        """TransformerEngine 3216: dK 88 times too large on a layer of a training run."""
        case = only_case(tmp_path, normal((2, 4, 16, 64), key_heads=2))
        tested = users(partial(SOUND["tiled"], **changes), "tested")
        record = judged(tested, case, 8, backend=on())
        assert record.answers["gradients"].passed is passed
        assert re.search(r"asked: O, and gradients .* beside .*; not asked: nothing", record.evidence[CAPTURED])

    def test_a_sequence_of_one_token_has_gradients_of_0_and_no_errors(self, tmp_path: Path) -> None:
        case = only_case(tmp_path, normal((4, 2, 1, 16)))
        assert judged(users(SOUND["tiled"], "tested"), case, 8, backend=on()).passed("gradients")

    def test_what_is_not_asked_of_a_captured_call_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(captured, "_SCORES", 4 * 48 * 96)
        case = only_case(tmp_path, normal((2, 4, 96, 16)), CAUSAL)
        tested = users(SOUND["tiled"], "tested", backward="none")
        record = judged(tested, case, 8, backend=on())
        told = record.evidence[CAPTURED].partition("; not asked: ")[2]
        assert all(word in told for word in ("48 queries of 96", "48 keys of 96", "gradients"))

    def test_cancelled_elements_do_not_hide_a_bias(self, tmp_path: Path) -> None:
        case = only_case(tmp_path, normal((2, 8, 48, 32)), CAUSAL)
        sample = sampled(case, TRUNCATING)
        assert sample.errors.bias.is_beyond(0.4)
        assert -0.55 < sample.errors.bias.mean < -0.4
        assert sample.errors.max_ulps <= 1
        ref = reference(case.make(1, 0, 256, BF16))
        large = ref.o.abs() >= 0.25 * ref.magnitude
        assert sample.errors.left_out == (~large).sum() > 1000
        # Errors that are in proportion to sum P |V|: in ulps of a cancelled O they are of any size.
        errors = sampled(case, composed_kernel("flash@paper")).errors
        assert 0.3 < errors.rms_ulps < 1
        assert errors.max_ulps < 8

    def test_cancelled_elements_are_still_held_to_the_bound(self, tmp_path: Path) -> None:
        def wrong(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
            del arithmetic, gradients
            ref = reference(inputs)
            cancelled = ref.o.abs() < 0.25 * ref.magnitude
            return AttentionOutput(torch.where(cancelled, ref.o + 10 * ref.magnitude, ref.o).bfloat16().float())

        case, kernel = only_case(tmp_path, normal((1, 4, 16, 8))), Kernel("wrong", wrong, None, takes=COMMON)
        assert sampled(case, kernel).errors.error_over_bound > 1.0

    def test_the_remedy_is_not_to_raise_what_cannot_help(self, tmp_path: Path) -> None:
        layer = normal((10, 4, 1, 2), keys=8)
        case = only_case(tmp_path, layer)
        assert not sampled(case, composed_kernel("flash@paper"), 1).obstacle
        assert sampled(case, composed_kernel("flash@paper"), 256).obstacle.startswith("the case has no more")
        short_of_time = Workbench(Settings(heads=256, cell_timeout=1e-9)).case(case, BF16)
        cell = Cell(CPU, composed_kernel("flash@paper"), OneCall(case), BF16)
        none_left = call._until_settled(cell, short_of_time, Settled("nothing"))
        assert none_left.obstacle.startswith("the case has no more")  # more time would draw no more heads
        opposed = layer | {"k": torch.zeros_like(layer["k"]), "v": torch.ones_like(layer["v"])}
        opposed["v"][:, :, ::2] = -1.015625
        cancelling = only_case(tmp_path / "gone", opposed)
        gone = sampled(cancelling, composed_kernel("flash@paper"))
        assert gone.obstacle.startswith("every element of O has cancelled")
        assert gone.prediction_passed is None
        for each, told in ((case, True), (cancelling, False)):
            record = judged(TRUNCATING, each, 256)
            assert ("fits" in record.evidence) is told


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=["bf16", "fp16"])
def test_fp32_is_rounded_and_16_bits_run_as_they_are(tmp_path: Path, fmt: Format) -> None:
    dtype = torch.bfloat16 if fmt == BF16 else torch.float16
    wide = {part: tensor.float() * 1.001 for part, tensor in normal((1, 2, 4, 8)).items()}
    narrow = {part: tensor.to(dtype) for part, tensor in wide.items()}
    for name, layer in (("wide", wide), ("narrow", narrow), ("dO alone", narrow | {"do": wide["do"]})):
        case = only_case(tmp_path / name, layer)
        assert case.fixed_heads is not None
        assert case.fixed_heads.formats == ((BF16, FP16) if name == "wide" else (fmt,))
        inputs = case.make(1, 0, 2, fmt)
        assert inputs.formats == Formats.of(fmt)
        assert all(torch.equal(getattr(inputs, part)[0], x[0].float()) for part, x in narrow.items())


class TestRuns:
    def test_the_captured_cases_run_alone_in_their_formats_and_again_by_their_command(
        self, matrix: MatrixRun, pytester: pytest.Pytester, kept: Kept
    ) -> None:
        wide = {part: tensor.float() for part, tensor in normal((1, 12, 32, 16)).items()}
        inputs = next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]").make(1, 0, 256, BF16)
        ties = {part: getattr(inputs, part).bfloat16().contiguous() for part in ("q", "k", "v", "do")}
        keep(pytester.path, {"0": ties, "1": wide})
        words = ("--captured", "./", "--backend", "emulation", "--kernels", "flash@paper,fair")
        assert matrix(*words, "--dtype", "bf16,fp16").ret == 0
        records = {(record.case[-2], record.kernel, record.format): record for record in kept().records}
        assert {(layer, fmt) for layer, _, fmt in records} == {("0", "bf16"), ("1", "bf16"), ("1", "fp16")}
        assert {record.outcome for record in records.values()} == {MEASURED}  # nothing is claimed of captured tensors
        tied, fair = records["0", "flash@paper", "bf16"], records["0", "fair", "bf16"]
        assert (tied.verdict, fair.verdict) == ("biased", "unbiased")
        assert tied.case_version == captured_cases(pytester.path)[0].version > 1
        assert [fair.heads, records["1", "fair", "bf16"].heads] == [256, 12]
        assert kept().options["captured"] == "./"
        assert re.search(r"--captured \.", fair.command)
        _, again = fair.command.split(" tiebreak.matrix ")
        matrix(*shlex.split(again), "--save", "again", "-n", "0")
        assert kept("again").records == (fair,)
        assert all(case.failure for case in captured_cases(pytester.path)), "--fair asks for no bias there"
        # With --cases both are named.
        keep(pytester.path, {"0": _poisoned(torch.nan), "1": wide})
        assert matrix(*words, "--cases", "captured[*.layer=1],random", "--heads", "64").ret == 0
        assert {record.case for record in kept().records} == {"captured[step=000007.layer=1]", "random"}


def _as(dtype: torch.dtype, factor: float = 1.0) -> Tensors:
    return {part: tensor.float().mul(factor).to(dtype) for part, tensor in normal((1, 2, 4, 8)).items()}


def _poisoned(value: float) -> Tensors:
    layer = normal((1, 2, 4, 8))
    layer["v"][0, 1, 2, 3] = value
    return layer


SMALL = normal((1, 2, 4, 8))


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


BAD_LAYERS: Mapping[str, tuple[Tensors, str]] = {
    "missing key": ({n: x for n, x in SMALL.items() if n != "v"}, r"layer3\.v is missing$"),
    "mixed formats": (
        SMALL | {"k": torch.zeros(1, 2, 4, 8)},
        r"layer3\.q bfloat16, layer3\.k float32, .*",
    ),
    "dO in another format": (
        SMALL | {"do": _zeros(1, 2, 4, 8).half()},
        r"layer3\.q bfloat16, .*layer3\.do float16; expected .*",
    ),
    "other format": (_as(torch.float64), r"layer3\.q float64, .*expected one of .* for all four, or.*"),
    "3 dimensions": (SMALL | {"q": _zeros(2, 4, 8)}, r"layer3\.q \(2, 4, 8\), .*\(batch, heads, .*"),
    "empty": (normal((1, 2, 0, 8)), r"layer3\.q \(1, 2, 0, 8\), .*none of them 0$"),
    "heads": (
        SMALL | {"k": _zeros(1, 3, 4, 8), "v": _zeros(1, 3, 4, 8)},
        r"layer3\.q .*2 query heads are no multiple of 3 key heads$",
    ),
    "more queries than keys": (normal((1, 2, 4, 8), keys=3), r"layer3\.q .*more queries than keys.*"),
    "Inf": (_poisoned(torch.inf), r"layer3\.v holds NaN or Inf; leave .*--cases$"),
    "beyond the format": (_as(torch.float32, 1e38), r"layer3\.q holds values beyond fp16; .*"),
}
BAD_METADATA: Mapping[str, tuple[Mapping[str, str], str]] = {
    "no mask": ({"step": "7"}, "metadata of layer3: .*`causal`$"),
    "mask": ({"causal": "yes"}, r"metadata of layer3: .*`bool`.*`\$.causal`$"),
    "order": (
        {**FULL, "layer3.made": "true", "layer3.order": "nhbd"},
        r"metadata of layer3: .*'nhbd' - at `\$.order`$",
    ),
    "padding": (FULL, r"layer3.key_padding \[2, 4\]; expected \[4\] or \[1, 4\], a number a key"),
    **{
        f"scale {scale}": ({**FULL, "scale": scale}, r"metadata of layer3: Expected `float.* - at `\$.scale`$")
        for scale in ("0", "inf", "nan", "one")
    },
}


class TestBadFiles:
    """One line that names the file and the key; from the command line with exit code 2, and nothing written."""

    def refused(self, folder: Path, message: str) -> None:
        fmt = FP16 if "fp16" in message else BF16
        with pytest.raises(CapturedError, match=message) as error:
            _ = [case.make(1, 0, 4, fmt) for case in captured_cases(folder)]
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(("layer", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
    def test_layers(self, tmp_path: Path, layer: Tensors, message: str) -> None:
        keep(tmp_path, {"3": layer}, metadata=CAUSAL)
        self.refused(tmp_path, f"inputs-000007.safetensors: {message}")

    @pytest.mark.parametrize(("metadata", "message"), BAD_METADATA.values(), ids=BAD_METADATA)
    def test_metadata(self, tmp_path: Path, metadata: Mapping[str, str], message: str) -> None:
        padding = torch.ones(2 if "padding" in message else 1, 4, dtype=torch.uint8)
        keep(tmp_path, {"3": normal((1, 2, 4, 8)) | {"key_padding": padding}}, metadata=metadata)
        self.refused(tmp_path, message)

    def test_what_is_no_safetensors_file(self, tmp_path: Path) -> None:
        path = keep(tmp_path, {"3": normal((1, 2, 4, 8))}, step="1")
        path.write_bytes(path.read_bytes()[:-1])
        self.refused(tmp_path, "inputs-1.safetensors: cannot be read as safetensors: .+")
        path.unlink()
        path.mkdir()
        self.refused(tmp_path, "inputs-1.safetensors: cannot be read as safetensors: .+")

    def test_a_folder_without_layers_or_files_or_none(self, tmp_path: Path) -> None:
        self.refused(tmp_path, r"--captured .*: no file in it is called inputs-STEP\.safetensors.*")
        self.refused(tmp_path / "nosuch", r"--captured .*nosuch: no such folder$")
        keep(tmp_path, {"s": {"w": torch.zeros(1)}})
        self.refused(tmp_path, r"no layers; expected keys such as layer0\.q$")

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (_poisoned(torch.nan), r"Exit: inputs-000007.safetensors: layer3\.v holds NaN or Inf; .*"),
            (_as(torch.float16), r"--dtype bf16: captured\[step=000007\.layer=3\] is in fp16; add that, or .*"),
        ],
        ids=["NaN", "format"],
    )
    def test_the_command_line(self, matrix: MatrixRun, pytester: pytest.Pytester, layer: Tensors, message: str) -> None:
        keep(pytester.path, {"3": layer})
        before = sorted(pytester.path.rglob("*"))
        result = matrix("--captured", ".", "--backend", "emulation", "--kernels", "standard")
        assert result.ret == 2
        lines = [line for line in (*result.outlines, *result.errlines) if "Exit: " in line or "Error" in line]
        assert len(lines) == 1, lines
        assert re.search(message, lines[0]), lines[0]
        assert sorted(pytester.path.rglob("*")) == before


def test_the_documented_example_is_a_case(pytester: pytest.Pytester) -> None:
    _, _, section = DOCS.read_text(encoding="utf-8").partition("\n### The format\n")
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {})
    (case,) = captured_cases(pytester.path)
    assert case.name == "captured[step=000001.layer=0]"
    inputs = case.make(1, 0, 16, BF16)
    assert inputs.q.shape == (2, 8, 64, 32)
    assert inputs.causal
    assert bool((inputs.do != 0).any())
