"""Capturing a model's calls of attention as it trains, in one process and in two."""

import contextlib
import gc
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.capture import AttentionModule, Capture, CaptureError, capture, session
from tiebreak.cases.captured import captured_cases
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import composed
from tiebreak.kernels.reference import reference

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 24, 3
HOW = AttentionModule(causal=True)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """Attention on heads of 8, and what it was given and got, kept for a test to compare."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = plain, key_heads: int = HEADS) -> None:
        super().__init__()
        self.attend, self.key_heads = attend, key_heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * key_heads * 8)
        self.noise = nn.Dropout(0.1)  # draws random numbers: a capture that drew some would change them
        self.calls: list[tuple[Tensor, ...]] = []
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.key_heads, 8)).permute(2, 0, 3, 1, 4)
        o = self.attend(q, k, v)
        if o.requires_grad:
            o.register_hook(lambda gradient: self.gradients.append(gradient.clone()))  # type: ignore[no-untyped-call]
        self.calls.append(tuple(part.detach().clone() for part in (q, k, v, o)))
        out: Tensor = x + self.noise(o.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(self, *layers: nn.Module, repeat: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or (Layer(), Layer()))
        self.repeat = repeat  # None: no checkpoints; else use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.repeat is None else checkpoint(layer, x, use_reentrant=self.repeat)
        return x.square().mean()


def model_of(*layers: Callable[[], nn.Module], repeat: bool | None = None) -> Model:
    torch.manual_seed(3)
    return Model(*(layer() for layer in layers), repeat=repeat)


def train(model: nn.Module, captured: Capture | None, steps: int = 3, batches: int = 1) -> list[float]:
    """The losses of a few steps under autocast."""
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        for _ in range(batches):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True))
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():  # torch's optimisers take seconds to import
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=1e-2)
                weight.grad = None
        if captured is not None:
            captured.step()
    return losses


def started(model: nn.Module, path: Path, **options: Any) -> Capture:
    return capture(model, path, **({"every": 1, "quiet": True} | options))


def caught(path: Path, *layers: Callable[[], nn.Module], steps: int = 1, **options: Any) -> Capture:
    """What is captured of a model of these layers in a few steps."""
    model = model_of(*layers)
    with started(model, path, **options) as captured:
        train(model, captured, steps=steps)
    return captured


def attending(**options: Any) -> Callable[[], nn.Module]:
    """A layer that calls torch's function with these options."""
    return lambda: Layer(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in list(file.keys())}, file.metadata()


def inputs_of(path: Path, number: int = 0) -> AttentionInputs:
    return captured_cases(path)[number].make(1, 0, 1000, BF16)


def error_of(path: Path, captured: Capture) -> float:
    """The largest error of the O that was kept first, by the reference on what was kept with it."""
    o = read(captured.written[0])[0]["layer0.o"]
    return (reference(inputs_of(path)).o - o).abs().max().item()


class TestTheModel:
    @pytest.mark.parametrize("repeat", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
    def test_its_numbers_stay_the_same_to_the_bit_and_a_call_counts_once(
        self, tmp_path: Path, repeat: bool | None
    ) -> None:
        alone = train(model_of(Layer, Layer, Layer, repeat=repeat), None, steps=2, batches=2)
        model = model_of(Layer, Layer, Layer, repeat=repeat)
        with started(model, tmp_path) as captured:
            assert train(model, captured, steps=2, batches=2) == alone
        assert (captured.calls["looked at"], len(captured.written)) == (6, 2)
        tensors, metadata = read(captured.written[0])
        assert sorted(key for key in tensors if key.endswith(".q")) == [f"layer{n}.q" for n in range(3)]
        assert [metadata[f"layer{n}.name"] for n in range(3)] == [f"layers.{n}" for n in range(3)]

    def test_its_graph_is_not_kept_alive_and_an_evaluation_is_no_call(self, tmp_path: Path) -> None:
        outputs: list[weakref.ref[Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = imported_by_name(q, k, v)  # seen like any other
            outputs.append(weakref.ref(out))
            return out * 1

        model = model_of(lambda: Layer(attend))
        with started(model, tmp_path) as captured:
            with torch.no_grad():
                model(torch.randn(BATCH, TOKENS, WIDTH))
            loss = model(torch.randn(BATCH, TOKENS, WIDTH))
            del loss
            gc.collect()
            assert [output() for output in outputs] == [None, None]
            captured.step()
            train(model, captured, steps=1)
        assert captured.calls["looked at"] == 1
        assert len(read(captured.written[0])[0]) == 6

    def test_it_is_let_go_and_between_the_steps_that_are_looked_at_it_has_no_hooks(self, tmp_path: Path) -> None:
        def watched() -> tuple[bool, bool]:
            """Whether torch's function is, and whether the model has hooks."""
            hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            return torch.nn.functional.scaled_dot_product_attention is not before, hooks

        model, before = model_of(Layer), torch.nn.functional.scaled_dot_product_attention
        captured, seen = started(model, tmp_path, every=2), []
        with contextlib.suppress(KeyboardInterrupt), captured:
            for steps in (0, 1, 3):
                train(model, captured, steps=steps)
                seen.append(watched())
            raise KeyboardInterrupt
        assert [*seen, watched()] == [(True, True), (True, False), (True, True), (False, False)]
        assert (captured.looked, captured.steps) == (2, 4)
        assert [path.name for path in captured.written] == [f"inputs-00000{n}.safetensors" for n in (0, 2)]


class TestWhatIsKept:
    def test_is_what_the_kernel_was_given_and_gave(self, tmp_path: Path) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        model = model_of(lambda: Layer(attend, key_heads=2))
        layer = cast(Layer, model.layers[0])
        with started(model, tmp_path, heads=5) as captured:
            train(model, captured, steps=1)
        tensors, metadata = read(captured.written[0])
        assert metadata["causal"] == "true"
        (call,), (gradient,) = layer.calls, layer.gradients
        for at, (entry, head) in enumerate(tensors["layer0.heads"].tolist()):
            for name, whole, size in zip(("q", "k", "v", "o", "do"), (*call, gradient), (2, 1, 1, 2, 2), strict=True):
                assert torch.equal(tensors[f"layer0.{name}"][at], whole[entry, head * size : (head + 1) * size]), name
        assert len(tensors["layer0.heads"]) == 5
        assert inputs_of(tmp_path).groups == 2
        assert error_of(tmp_path, captured) < 0.01

    @pytest.mark.parametrize(("ratio", "scale"), [(8.0, None), (0.5, None), (1.1, 1.1 * 8**-0.5)])
    def test_another_scale_is_folded_if_that_is_exact_and_told_if_not(
        self, tmp_path: Path, ratio: float, scale: float | None
    ) -> None:
        captured = caught(tmp_path, attending(scale=ratio * 8**-0.5))
        inputs = inputs_of(tmp_path)
        assert inputs.softmax_scale == scale
        assert not inputs.causal
        assert error_of(tmp_path, captured) < 0.01

    def test_of_fewer_queries_under_a_causal_mask_keys_that_nobody_sees_are_left_out(self, tmp_path: Path) -> None:
        def few(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain(q[:, :, :10], k, v).repeat(1, 1, 3, 1)[:, :, :TOKENS]

        for name, layer, tokens in (("queries", lambda: Layer(few), TOKENS), ("tokens", Layer, 10)):
            captured = caught(tmp_path / name, layer, tokens=tokens)
            inputs = inputs_of(tmp_path / name)
            assert inputs.q.shape[2] == inputs.k.shape[2] == 10
            assert error_of(tmp_path / name, captured) < 0.01

    @pytest.mark.parametrize("mask", [True, torch.finfo(torch.bfloat16).min, 0.0])
    def test_a_mask_that_says_causal_is_a_causal_flag(self, tmp_path: Path, mask: float) -> None:
        visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        hidden = torch.zeros(1, 1, TOKENS, TOKENS).bfloat16().masked_fill(~visible, mask)
        caught(tmp_path, attending(attn_mask=visible if mask is True else hidden))
        assert inputs_of(tmp_path).causal is (mask != 0.0)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"dropout_p": 0.1}, "dropout"),
            ({"attn_mask": torch.linspace(-1, 0, TOKENS).expand(TOKENS, TOKENS)}, "a mask that is neither causal"),
            ({"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(2)}, "a mask that is neither causal"),
            (None, "NaN or Inf"),
        ],
    )
    def test_what_the_format_has_no_place_for_is_counted_and_named(
        self, tmp_path: Path, options: dict[str, Any] | None, why: str
    ) -> None:
        layer = lambda: Layer(lambda q, k, v: plain(q, k, v * torch.nan))  # noqa: E731
        captured = caught(tmp_path, layer if options is None else attending(**options), steps=2)
        assert captured.written == []
        assert f"not kept: 2 calls with {why}" in captured.summary()

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("causal", [True, False])
    def test_sequences_of_a_padded_batch_are_cut_to_their_own_tokens(
        self, tmp_path: Path, side: str, causal: bool
    ) -> None:
        """Padding sees what it likes; its q, k and v would ruin every statistic."""
        at = torch.arange(TOKENS)
        sizes = torch.tensor([10, TOKENS, 10])[:, None]
        own = at < sizes if side == "right" else at >= TOKENS - sizes
        mask = own[:, None, None] & (torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() | (not causal))
        mask = mask | (~mask.any(-1, keepdim=True) & own.any())

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k = torch.where(own[:, None, :, None], k, 1e4)
            q = torch.where(torch.tensor([True, False, True])[:, None, None, None], q * 40, q)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        model = model_of(lambda: Layer(attend))
        layer = cast(Layer, model.layers[0])
        with started(model, tmp_path, heads=5) as captured:
            train(model, captured, steps=1)
        tensors, metadata = read(captured.written[0])
        rows = slice(0, 10) if side == "right" else slice(TOKENS - 10, TOKENS)
        assert (metadata["causal"], set(tensors["layer0.heads"][:, 0].tolist())) == (str(causal).lower(), {0, 2})
        (call,), (gradient,) = layer.calls, layer.gradients
        for at_, (entry, head) in enumerate(tensors["layer0.heads"].tolist()):
            for name, whole in (("v", call[2]), ("o", call[3]), ("do", gradient)):
                assert torch.equal(tensors[f"layer0.{name}"][at_, 0], whole[entry, head, rows]), name
        assert error_of(tmp_path, captured) < 0.01

    def test_a_forward_pass_alone_has_no_do_and_none_is_asked(self, tmp_path: Path) -> None:
        model = model_of(Layer, Layer)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), started(model, tmp_path) as captured:
            model(torch.randn(BATCH, TOKENS, WIDTH))
        tensors, _ = read(captured.written[0])
        assert sorted(name for name in tensors if name.startswith("layer1")) == [
            f"layer1.{x}" for x in ("heads", *"koqv")
        ]
        assert [case.gradients for case in captured_cases(tmp_path)] == [False, False]
        assert error_of(tmp_path, captured) < 0.01


def tied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In the last batch entry's head 1 every key is the same, so that every maximum repeats."""
    same = torch.zeros(BATCH, HEADS, 1, 1, dtype=torch.bool)
    same[-1, 1] = True
    return torch.nn.functional.scaled_dot_product_attention(q, torch.where(same, k[:, :, :1], k), v)


class TestTelling:
    def test_heads_whose_maxima_repeat_come_first(self, tmp_path: Path) -> None:
        captured = caught(tmp_path, lambda: Layer(tied), Layer, heads=1, layers=1)
        tensors, metadata = read(captured.written[0])
        assert tensors["layer0.heads"].tolist() == [[BATCH - 1, 1]]
        assert "layer1.q" not in tensors
        assert metadata["layer0.repeated"] == "1"

    def test_heads_with_a_sink_come_before_others_and_the_bias_that_plain_flash_has_on_them_is_told(
        self, tmp_path: Path
    ) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """In head 2 the first key has a P of 0.94 in each row: its value is 1, the others' 0.03 together."""
            here = (torch.arange(HEADS) == 2)[:, None, None]
            first = torch.arange(TOKENS)[:, None] == 0
            q, k = torch.where(here, q * 0 + 1, q), torch.where(here, k * 0 + 2.1 * first, k)
            return torch.nn.functional.scaled_dot_product_attention(q, k, torch.where(here, v * 0 + first + 0.5, v))

        captured = caught(tmp_path, lambda: Layer(attend), Layer, heads=3, layers=1)
        tensors, metadata = read(captured.written[0])
        assert tensors["layer0.heads"][:, 1].tolist() == [2] * BATCH
        assert metadata["layer0.sinks"] == "1"
        inputs = inputs_of(tmp_path)
        flash = (
            composed("paper", parse_declaration("flash@paper,tile=one")).compute(inputs, EMULATION.arithmetic, False).o
        )
        bias = signed_error_ulps(flash, reference(inputs).o, BF16).mean().item()
        assert float(metadata["layer0.bias"]) == pytest.approx(bias, abs=0.02)
        assert "2 of batch entry" in captured.summary().splitlines()[4]

    def test_rows_that_see_few_keys_are_no_sinks(self, tmp_path: Path) -> None:
        """A sequence of one token has a P of 1 in each row."""
        own = torch.arange(TOKENS) < torch.tensor([1, 2, TOKENS])[:, None]
        mask = own[:, None, None] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        captured = caught(tmp_path, attending(attn_mask=mask))
        tensors, metadata = read(captured.written[0])
        assert (len(tensors["layer0.q"][0, 0]), metadata["layer0.sinks"]) == (TOKENS, "0")

    def test_the_largest_logit_and_deltas_bias_are_those_of_the_rows_that_were_looked_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def too_large(*args: Any, **kwargs: Any) -> Tensor:
            return imported_by_name(*args, **kwargs) * 1.02

        too_large.__name__ = imported_by_name.__name__
        monkeypatch.setattr(torch.nn.functional, imported_by_name.__name__, too_large)
        captured = caught(tmp_path, lambda: Layer(lambda q, k, v: plain(q * 8, k, v)), heads=100, tokens=16)
        ((tensors, metadata), inputs) = read(captured.written[0]), inputs_of(tmp_path)
        hidden, ref = inputs.hidden(), reference(inputs)
        assert hidden is not None
        largest = ref.s.masked_fill(hidden, -torch.inf).max().item()
        assert float(metadata["layer0.largest"]) == pytest.approx(largest, rel=1e-5)
        delta = (ref.o * inputs.do).sum(-1)
        wrong = (tensors["layer0.o"].double() * inputs.do).sum(-1) - delta
        expected = (wrong.sum(-1) / delta.abs().sum(-1)).mean().item()
        assert float(metadata["layer0.delta_bias"]) == pytest.approx(expected, rel=1e-3)
        assert float(metadata["layer0.telling"]) > 0.5


class TestTheFolder:
    def test_the_least_telling_give_way(self, tmp_path: Path) -> None:
        factors = iter([4.0, 1.0, 64.0, 16.0, 0.5])
        captured = caught(
            tmp_path, lambda: Layer(lambda q, k, v: plain(q * next(factors), k, v)), steps=5, budget_mb=0.065
        )
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["inputs-000002.safetensors", "inputs-000003.safetensors"]
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 65_000
        assert "inputs-000002.safetensors" in captured.summary().split("\n")[4]

    def test_a_second_run_goes_on_and_a_step_that_is_there_already_stays_and_is_told(self, tmp_path: Path) -> None:
        for _ in range(2):
            captured = caught(tmp_path, Layer, steps=2, budget_mb=0.2)
        names = [f"inputs-00000{n}.safetensors" for n in range(4)]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert len(captured._folder.kept) == 4
        before = [(tmp_path / name).read_bytes() for name in names]
        captured = caught(tmp_path, Layer, start=0)
        assert [(tmp_path / name).read_bytes() for name in names] == before
        assert "not kept: 1 calls of a step that the folder has already" in captured.summary()

    def test_what_does_not_fit_gives_up_heads_or_waits_for_its_turn(self, tmp_path: Path) -> None:
        captured = caught(tmp_path / "budget", Layer, budget_mb=0.013)
        assert len(read(captured.written[0])[0]["layer0.heads"]) == 2
        captured = caught(tmp_path / "memory", Layer, Layer, Layer, steps=3, memory_mb=0.01)
        assert [next(iter(read(path)[0]))[:6] for path in captured.written] == ["layer0", "layer1", "layer2"]

    def test_files_of_others_count_but_never_give_way(self, tmp_path: Path) -> None:
        other = tmp_path / "inputs-000099.safetensors"
        other.write_bytes(b"x" * 50_000)
        captured = caught(tmp_path, Layer, steps=3, budget_mb=0.09, start=0)
        assert other.exists()
        assert len(captured._folder.kept) == 1
        with pytest.raises(CaptureError, match=r"^budget_mb=0\.05: .* has 0\.1 MB of captures that are not"):
            started(model_of(Layer), tmp_path, budget_mb=0.05).__enter__()

    def test_no_half_file_after_ctrl_c(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(source: object, target: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.replace", interrupted)
        model = model_of(Layer)
        with started(model, tmp_path) as captured, pytest.raises(KeyboardInterrupt):
            train(model, captured, steps=1)
        assert list(tmp_path.iterdir()) == []

    def test_every_process_has_files_and_a_share_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for rank in (0, 1):
            monkeypatch.setattr(session, "_ranks", lambda rank=rank: (rank, 2))
            captured = caught(tmp_path, Layer, steps=3, budget_mb=0.08, start=7)
            assert captured._folder.budget == 40_000
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 2
        assert [re.fullmatch(r"inputs-00000\d-rank(\d)\.safetensors", name)[1] for name in names] == ["0", "1"]  # type: ignore[index]
        assert {case.name[20:] for case in captured_cases(tmp_path)} == {".rank=0.layer=0]", ".rank=1.layer=0]"}


class TestOtherWaysToCall:
    @pytest.mark.parametrize("heads_first", [True, False])
    def test_a_module_that_is_named(self, tmp_path: Path, heads_first: bool) -> None:
        def ordered(x: Tensor) -> Tensor:
            return x if heads_first else x.transpose(1, 2)

        class Core(nn.Module):
            def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                q, k, v = map(ordered, (query, key, value))
                return ordered(((q @ k.mT) * 8**-0.5).softmax(-1) @ v)

        core = Core()
        model = model_of(lambda: Layer(lambda q, k, v: ordered(core(*map(ordered, (q, k, v))))))
        model.layers[0].core = core
        how = AttentionModule(causal=False, heads_first=heads_first)
        with started(model, tmp_path, modules={"layers.*.core": how}) as captured:
            train(model, captured, steps=1)
        assert read(captured.written[0])[1]["layer0.name"] == "layers.0.core"
        assert error_of(tmp_path, captured) < 0.02

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({}, None),
            ({"is_causal": False}, None),
            ({"softcap": 30.0}, "a soft cap"),
            ({"sliding_window": 4}, "a sliding window"),
            ({"dropout": 0.1}, "dropout"),
            ({"attention_mask": torch.tensor([[1, 0] + [1] * (TOKENS - 2)] * BATCH)}, "padding within a sequence"),
            ({"attention_mask": "of blocks"}, "a str"),
        ],
    )
    def test_hugging_faces_functions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str | None
    ) -> None:
        def function(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **arguments: Any
        ) -> tuple[Tensor, None]:
            del module
            flag = arguments.get("is_causal", True)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=flag).transpose(1, 2), None

        class Functions(dict[str, Any]):
            def valid_keys(self) -> list[str]:
                return list(self)

            @classmethod
            def register(cls, key: str, value: object) -> None:
                functions[key] = value

        functions = Functions(mine=function, sdpa=function)
        library = types.ModuleType("transformers.modeling_utils")
        library.ALL_ATTENTION_FUNCTIONS = functions  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformers.modeling_utils", library)

        core = nn.Identity()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = functions["mine"](core, q, k, v, **{"attention_mask": None, "dropout": 0.0, **options})[0]
            return out.transpose(1, 2)

        captured = caught(tmp_path, lambda: Layer(attend))
        assert functions == {"mine": function, "sdpa": function}
        if why is None:
            assert inputs_of(tmp_path).causal is options.get("is_causal", True)
        else:
            assert captured.written == []
            assert f"not kept: 1 calls with {why}" in captured.summary().splitlines()

    @pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_hugging_faces_models(self, tmp_path: Path, implementation: str) -> None:
        library: Any = importlib.import_module("transformers")
        torch.manual_seed(1)
        small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = library.AutoConfig.for_model("llama", vocab_size=31, attn_implementation=implementation, **small)
        model = library.AutoModelForCausalLM.from_config(config).train()
        tokens = torch.arange(2 * TOKENS).reshape(2, TOKENS) % 31
        with started(model, tmp_path) as captured:
            model(input_ids=tokens, labels=tokens).loss.backward()
            captured.step()
        assert captured.calls["looked at"] == 2
        assert inputs_of(tmp_path).causal
        assert error_of(tmp_path, captured) < 0.01


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            *(({name: 0}, f"^{name}=0: expected a positive number$") for name in ("every", "memory_mb")),
            ({"start": -1}, r"^start=-1: expected a step's number, 0 or more$"),
            ({"modules": {"none.*": HOW}}, r"^modules='none\.\*': the model has no module of that name"),
            ({"modules": {"layers.0": HOW}}, r"^modules='layers\.0': layers\.0\.forward takes x, not q, k and v"),
            ({}, r"^layers\.0 is compiled, which hides its calls; give capture the model before torch\.compile$"),
        ],
    )
    def test_what_it_can_not_work_with(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        model = model_of(Layer)
        if not options:
            model.layers[0]._compiled_call_impl = print  # as Module.compile leaves it
        with pytest.raises(CaptureError, match=message), started(model, tmp_path, **options):
            pass

    def test_a_budget_too_small_for_one_head(self, tmp_path: Path) -> None:
        message = r"^budget_mb: one head of layers\.0 takes 0\.00 MB, and the budget is 0\.01 MB.*raise it$"
        with pytest.raises(CaptureError, match=message):
            caught(tmp_path, Layer, budget_mb=0.0085)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CaptureError, match=r"^capture: cannot write to .*file/inside: .+$"):
            started(model_of(Layer), tmp_path / "file" / "inside").__enter__()


def test_the_summary_is_printed_with_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured = caught(tmp_path, Layer, quiet=False)
    printed = capsys.readouterr().err
    assert printed == captured.summary() + "\n"
    assert printed.endswith(f"next: tiebreak check my.py:attention --captured {tmp_path}\n")
    captured = caught(tmp_path, lambda: Layer(lambda q, k, v: (q @ k.mT).softmax(-1) @ v))
    assert "no call was seen: torch's scaled_dot_product_attention" in captured.summary()


# Its words: the folder that its two processes meet in, and this file. Each has inputs of its own.
RANK = """
import json, os, runpy, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder, tests = Path(sys.argv[1]), runpy.run_path(sys.argv[2])
torch.set_num_threads(1)
rank = int(os.fork() == 0)  # what takes seconds to import is imported once
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def same(number, layer, kept):
    batch, head = kept[f"layer{number}.heads"].T
    parts = zip(("q", "k", "v", "o", "do"), (*layer.calls[1], layer.gradients[1]))
    return all(torch.equal(kept[f"layer{number}.{part}"][:, 0], own[batch, head]) for part, own in parts)

found = {}
for name, wrap in {"ddp": nn.parallel.DistributedDataParallel, "fsdp": sharded}.items():
    model = tests["model_of"](tests["Layer"], tests["Layer"])
    model.register_forward_pre_hook(lambda module, given: (given[0] * (1 + rank),))
    wrapped = wrap(model)
    with tests["started"](wrapped, folder / name) as captured:
        tests["train"](wrapped, captured, steps=2)
    kept = [same(number, layer, load_file(captured.written[1])) for number, layer in enumerate(model.layers)]
    found[name] = [*kept, *sorted(path.name for path in captured.written)]
(folder / f"rank{rank}.json").write_text(json.dumps(found))
distributed.barrier()
failed = 0 if rank else os.waitstatus_to_exitcode(os.wait()[1])
os._exit(failed)  # gloo may abort while the interpreter ends: "terminate called without an active exception"
"""


def test_under_ddp_and_fsdp_a_process_keeps_the_tensors_of_its_own_layers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    words = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), __file__]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        expected = [True, True, *(f"inputs-00000{step}-rank{rank}.safetensors" for step in (0, 1))]
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {"ddp": expected, "fsdp": expected}
