"""Dumps of engines: a mapping makes a folder of calls with answers of them."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases import runner
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import run_forward
from tiebreak.programs import pair as program
from tiebreak.programs.files import backend, export, judge
from tiebreak.programs.pair import pair
from tiebreak.reports import cli
from tiebreak.reports.calls import MANIFEST, Calls
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs.verdict import APART, ROUNDINGS, SAME
from tiebreak.reports.records import store

HEADS, KEY_HEADS, D = 16, 8, 16
#: Queries and keys of each sequence: two of equal sizes, one of others.
LENGTHS = ((20, 32), (20, 32), (7, 7))
DECODING = ((1, 40), (1, 17), (1, 33))

Sequences = list[dict[str, Tensor]]
Damage = Callable[[Path, dict[str, Any]], object]
Writing = Callable[[Path, Sequences], dict[str, Any]]


def made(
    lengths: Any = LENGTHS,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    plan: str = "flash@fused",
    apart: float = 0.0,
    heads: int = HEADS,
    key_heads: int = KEY_HEADS,
    zeros: int = 0,
) -> Sequences:
    """Return sequences with what a plan has for them, (heads, tokens, d).

    `apart`: q of another engine; `zeros`: the columns of V that pad its head dimension.
    """
    rng, sequences = torch.Generator().manual_seed(1), []
    for queries, keys in lengths:
        q = torch.randn(heads, queries, D, generator=rng).bfloat16()
        k, v = (torch.randn(key_heads, keys, D, generator=rng) for _ in range(2))
        k, v, q = k.bfloat16(), (0.3 * v - 2.4).bfloat16(), (q.float() * (1.0 + apart)).bfloat16()
        v[..., D - zeros :] = 0.0
        given = [x[None].float() for x in (q, k, v)]
        inputs = AttentionInputs(
            *(given[0], given[1], given[2], given[0], Formats.of(BF16)),
            causal=True,
            window=(None, None) if window is None else (window - 1, 0),
            sink=None if sink is None else sink.float(),
        )
        out = run_forward(parse_declaration(plan), inputs, EMULATION.arithmetic)
        assert out.lse is not None
        sequences.append({"q": q, "k": k, "v": v, "o": out.o[0].bfloat16(), "lse": out.lse[0, ..., 0]})
    return sequences


def packed(sequences: Sequences, name: str) -> Tensor:
    """One tensor of all sequences, (tokens, heads, d), or (heads, tokens) of the log-sum-exp."""
    x = torch.cat([each[name] for each in sequences], 1)
    return x if name == "lse" else x.transpose(0, 1).contiguous()


def begins(sequences: Sequences, name: str) -> list[int]:
    return [0, *np.cumsum([each[name].shape[1] for each in sequences]).tolist()]


def in_rows(folder: Path, sequences: Sequences) -> dict[str, Any]:
    """As FlashAttention's varlen has it, a safetensors file a layer."""
    save_file({name: packed(sequences, name) for name in ("q", "k", "v", "o", "lse")}, folder / "l_03.safetensors")
    np.save(folder / "cu_q.npy", np.array(begins(sequences, "q"), np.int32))
    return {
        **{name: f"l_{{layer}}.safetensors:{name}" for name in ("q", "k", "v", "o", "lse")},
        "layout": "tokens heads dim",
        "cu_seqlens_q": "cu_q.npy",
        "cu_seqlens_k": begins(sequences, "k"),
    }


def in_numpy(folder: Path, sequences: Sequences) -> dict[str, Any]:
    """As `.float().numpy()` leaves it, heads flat, but K, which is bits."""
    x = {name: packed(sequences, name).float().numpy() for name in ("q", "v", "o", "lse")}
    k = packed(sequences, "k").view(torch.int16).numpy().view(np.uint16)
    flat = {name: each if name == "lse" else each.reshape(len(each), -1) for name, each in {**x, "k": k}.items()}
    np.savez(folder / "layer3.npz", allow_pickle=False, **flat)
    return {
        **{name: f"layer{{layer}}.npz:{name}" for name in ("q", "k", "v", "o", "lse")},
        "layout": "tokens (heads dim)",
        "heads": HEADS,
        "kv_heads": KEY_HEADS,
        "dtype": "bf16",
        **{f"cu_seqlens_{name}": begins(sequences, name) for name in "qk"},
    }


def in_pages(folder: Path, sequences: Sequences, *, size: int = 16) -> dict[str, Any]:
    """As vLLM has it: K and V in a pool of pages, one tensor, NaN where no key lies."""
    pages, pool = [list[int]() for _ in sequences], torch.full((2, 128, size, KEY_HEADS, D), torch.nan).bfloat16()
    free = iter(torch.randperm(128, generator=torch.Generator().manual_seed(2)).tolist())
    for row, each in zip(pages, sequences, strict=True):
        for at in range(0, each["k"].shape[1], size):
            row.append(next(free))
            for part, name in enumerate("kv"):
                own = each[name][:, at : at + size].transpose(0, 1)
                pool[part, row[-1], : len(own)] = own
    table = [row + [-1] * (max(map(len, pages)) - len(row)) for row in pages]
    layer = {"query": packed(sequences, "q").flatten(1), "out": packed(sequences, "o").flatten(1), "kv_cache": pool}
    torch.save({"model.layers.3": {"attn": layer}}, folder / "step7.pt")
    metadata = {"start": begins(sequences, "q"), "lens": [each["k"].shape[1] for each in sequences], "table": table}
    save_file({name: torch.tensor(x) for name, x in metadata.items()}, folder / "step7.safetensors")
    return {
        "q": "step{step}.pt:model.layers.{layer}.attn.query",
        "kv": {"tensor": "step{step}.pt:model.layers.{layer}.attn.kv_cache", "layout": "kv pages page heads dim"},
        "o": "step{step}.pt:model.layers.{layer}.attn.out",
        "layout": "tokens (heads dim)",
        "heads": HEADS,
        "cu_seqlens_q": "step{step}.safetensors:start",
        "seqused_k": "step{step}.safetensors:lens",
        "block_table": "step{step}.safetensors:table",
    }


def in_slots(folder: Path, sequences: Sequences) -> dict[str, Any]:
    """As SGLang has it: pages of one key, the pools apart."""
    mapping = in_pages(folder, sequences, size=1)
    pool = torch.load(folder / "step7.pt")["model.layers.3"]["attn"]["kv_cache"]
    for name, x in zip("kv", pool, strict=True):
        np.save(folder / f"{name}3.npy", x[:, 0].view(torch.int16).numpy().view(np.uint16))
        mapping[name] = {"tensor": f"{name}{{layer}}.npy", "layout": "pages heads dim"}
    del mapping["kv"]
    return mapping


def in_heads(folder: Path, sequences: Sequences) -> dict[str, Any]:
    """q, k and v behind each other in the heads of one tensor, a file each."""
    np.save(folder / "qkv-3.npy", torch.cat([packed(sequences, name) for name in "qkv"], 1).float().numpy())
    np.save(folder / "o-3.npy", packed(sequences, "o").float().numpy())
    numbers = {"heads": HEADS, "kv_heads": KEY_HEADS, "dtype": "bf16"}
    cu = {"cu_seqlens_q": begins(sequences, "q")}
    return {"qkv": "qkv-{layer}.npy", "o": "o-{layer}.npy", "layout": "tokens heads dim", **numbers, **cu}


def written(folder: Path, mapping: Mapping[str, Any]) -> Path:
    """A mapping as a file, and the dump's folder beside it."""
    lines = {"causal": True, "folder": "dump", **mapping}
    table = {name: x for name, x in lines.items() if isinstance(x, dict)}
    text = [f"{name} = {json.dumps(x)}" for name, x in lines.items() if name not in table and x is not None]
    for name, x in table.items():
        text += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in x.items())]
    (path := folder / "dump.toml").write_text("\n".join(text))
    return path


def exported(tmp_path: Path, writing: Writing, sequences: Sequences, **more: Any) -> Path:
    """A folder of calls of a dump."""
    (tmp_path / "dump").mkdir(parents=True)
    mapping = written(tmp_path, {**writing(tmp_path / "dump", sequences), **more})
    assert export.main([str(tmp_path / "calls"), "--dump", str(mapping)]) == 0
    return tmp_path / "calls"


def contents(folder: Path) -> dict[str, tuple[bytes, ...]]:
    """The answers of a folder by the digests of their calls."""
    manifest = store.load(folder / MANIFEST, Calls)
    outputs = {call.digest: runner.read(folder / f"{call.id}.out.safetensors")[0]["o"] for call in manifest.calls}
    return {digest: (runner.to_bytes(o), str(o.shape).encode()) for digest, o in outputs.items()}


@pytest.mark.parametrize("writing", [in_numpy, in_pages, in_slots])
@pytest.mark.parametrize("lengths", [LENGTHS, DECODING])
def test_one_call_is_the_same_however_an_engine_lays_it_out(tmp_path: Path, writing: Writing, lengths: Any) -> None:
    plain = contents(exported(tmp_path / "plain", in_rows, made(lengths)))
    assert contents(exported(tmp_path / "other", writing, made(lengths))) == plain
    assert len(plain) == (2 if lengths is LENGTHS else 1)


def test_heads_behind_each_other_are_q_k_and_v(tmp_path: Path) -> None:
    sequences = made([(20, 20), (7, 7)])
    plain = contents(exported(tmp_path / "plain", in_rows, sequences))
    assert contents(exported(tmp_path / "other", in_heads, sequences)) == plain


@pytest.mark.parametrize(("writing", "lengths"), [(in_rows, LENGTHS), (in_pages, DECODING)])
def test_a_sound_engine_follows_its_plan_and_one_sequence_with_another_s_rows_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writing: Writing, lengths: Any
) -> None:
    sequences = made(lengths)
    good = exported(tmp_path / "good", writing, sequences, device="a card of ours")
    words = ("-n", "0", "--out", str(tmp_path / "out"), "--declare", "plan=flash@fused")
    assert judge.main([str(good), *words]) == 0
    assert "a card of ours, as device.json states" in capsys.readouterr().out
    sequences[1]["o"] = sequences[0]["o"]
    assert judge.main([str(exported(tmp_path / "bad", writing, sequences)), *words]) == 1


@pytest.mark.parametrize(
    "shape",
    [
        {"plan": "flash@paper", "key_heads": 1},
        {"plan": "flash@fused,tile=24", "key_heads": 2},
        {"heads": 28, "key_heads": 1, "zeros": 4},
    ],
    ids=["one", "a plan that nobody knows", "28 heads and padding"],
)
def test_few_key_heads_tell_by_their_rows_whether_errors_are_as_large_as_a_plan_s(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    """An engine that splits a model over eight devices may have one a rank; no known plan has tiles of 24 keys."""
    sequences, words = made([(90, 90)], **shape), ("-n", "0", "--out", str(tmp_path / "out"))
    assert judge.main([str(exported(tmp_path / "good", in_rows, sequences)), *words]) == 0
    sequences[0]["o"][3] *= 1.02
    assert judge.main([str(exported(tmp_path / "bad", in_rows, sequences)), *words]) == 1


@pytest.mark.parametrize("lengths", [LENGTHS, DECODING])
def test_windows_and_sinks_are_those_of_the_call(tmp_path: Path, lengths: Any) -> None:
    sink = torch.linspace(-1.0, 2.0, HEADS).bfloat16()
    sequences, words = made(lengths, window=9, sink=sink), ("-n", "0", "--out", str(tmp_path / "out"))
    for name, more, code in (("good", {}, 0), ("other window", {"window": 8}, 1)):
        (folder := tmp_path / name).mkdir()
        save_file({"sink": sink}, folder / "sink.safetensors")
        mapping = {"folder": ".", "window": 9, "sink": "sink.safetensors:sink", **in_rows(folder, sequences), **more}
        assert export.main([str(folder / "calls"), "--dump", str(written(folder, mapping))]) == 0
        assert judge.main([str(folder / "calls"), *words]) == code


def test_layers_ranks_and_steps_are_cases_and_some_layers_can_be_taken(tmp_path: Path) -> None:
    for layer in (2, 10):
        for rank in (0, 1):
            x = {name: each for name, each in made()[0].items() if name != "lse"}
            save_file({name: each.contiguous() for name, each in x.items()}, tmp_path / f"{layer}-{rank}.safetensors")
    mapping = {name: f"{{layer}}-{{rank}}.safetensors:{name}" for name in "qkvo"} | {"layout": "heads tokens dim"}
    path = written(tmp_path, {**mapping, "folder": "."})
    assert export.main([str(tmp_path / "calls"), "--dump", str(path)]) == 0
    cases = [call.case for call in store.load(tmp_path / "calls" / MANIFEST, Calls).calls]
    assert cases == [f"captured[step=000000.rank={rank}.layer={layer}]" for rank in (0, 1) for layer in (2, 10)]
    path = written(tmp_path, {**mapping, "folder": ".", "layers": [10]})
    assert export.main([str(tmp_path / "ten"), "--dump", str(path)]) == 0
    assert all("layer=10" in call.case for call in store.load(tmp_path / "ten" / MANIFEST, Calls).calls)


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(folder: Path, mapping: dict[str, Any]) -> None:
        x, _ = runner.read(path := folder / "l_03.safetensors")
        runner.write(path, {**x, name: change(x[name])}, {})

    return damage


def _mapped(**fields: Any) -> Damage:
    return lambda _, mapping: mapping.update(fields)


def _nan(x: Tensor) -> Tensor:
    x[1, 1, 1] = torch.nan
    return x


#: Mistakes, and what the line that is said of each names.
MISTAKES: dict[str, tuple[Damage, str]] = {
    "no such file": (_mapped(k="l_{layer}.npz:k"), "k of layer 03"),
    "no such tensor": (_mapped(k="l_{layer}.safetensors:key"), "k of layer 03"),
    "no layer at all": (_mapped(q="m_{layer}.safetensors:q"), "m_{layer}"),
    "no such layer": (_mapped(layers=[4]), "layers"),
    "a word in braces": (_mapped(q="l_{laier}.safetensors:q"), "{laier}"),
    "braces that q lacks": (_mapped(o="l_{layer}-{step}.safetensors:o"), "{step}"),
    "no file's name": (_mapped(q="q"), "FILE"),
    "not a file of tensors": (lambda folder, _: (folder / "l_03.safetensors").write_bytes(b"no"), "l_03"),
    "a file cut short": (lambda folder, _: runner.replace(folder / "cu_q.npy", b"\x93NUMPY"), "cu_q.npy"),
    "no folder": (_mapped(folder="dmup"), "dmup"),
    "an unknown field": (_mapped(casual=True), "casual"),
    "a wrong type": (_mapped(scale="1/8"), "scale"),
    "a scale of 0": (_mapped(scale=0.0), "scale"),
    "no layout": (lambda _, mapping: mapping.pop("layout"), "layout"),
    "an unknown dimension": (_mapped(layout="tokens heads depth"), "depth"),
    "a dimension twice": (_mapped(layout="tokens tokens dim"), "tokens"),
    "no dim": (_mapped(layout="tokens heads"), "dim"),
    "more dimensions": (_mapped(layout="batch tokens heads dim"), "dimensions"),
    "a product of unknown sizes": (_mapped(layout="tokens (heads dim)"), "dimensions"),
    "heads and tokens the wrong way": (_mapped(layout="heads tokens dim"), "cu_seqlens_q"),
    "other numbers of heads": (_mapped(heads=12), "heads"),
    "heads that are no multiple": (_tensor("k", lambda x: torch.cat([x, x[:, :1]], 1)), "fit"),
    "fewer values than keys": (_tensor("v", lambda x: x[:-1].contiguous()), "cu_seqlens_k"),
    "another head dimension": (_tensor("k", lambda x: x[..., :8].contiguous()), "fit"),
    "fewer outputs": (_tensor("o", lambda x: x[:-1].contiguous()), "cu_seqlens_q"),
    "a log-sum-exp of other rows": (_tensor("lse", lambda x: x[:, :-1].contiguous()), "lse"),
    "another format": (_tensor("o", torch.Tensor.half), "dtype"),
    "fp32": (_tensor("q", lambda x: x.float()), "dtype"),
    "NaN in K": (_tensor("k", _nan), "NaN"),
    "q, k and qkv": (_mapped(qkv="l_{layer}.safetensors:q"), "qkv"),
    "q alone of heads behind each other": (
        _mapped(q=None, k=None, v=None, qkv="l_{layer}.safetensors:q", heads=12),
        "heads",
    ),
    "no k": (lambda _, mapping: mapping.pop("k"), "q and kv"),
    "sequences that end early": (_mapped(cu_seqlens_q=[0, 20, 40, 46]), "46"),
    "sequences that begin late": (_mapped(cu_seqlens_q=[1, 20, 40, 47]), "cu_seqlens_q"),
    "sequences that go back": (_mapped(cu_seqlens_q=[0, 40, 20, 47]), "cu_seqlens_q"),
    "sequences of q alone": (_mapped(cu_seqlens_q=[0, 20, 47]), "sequences"),
    "lengths that are no whole numbers": (_mapped(cu_seqlens_q="l_{layer}.safetensors:lse"), "whole"),
    "more queries than keys": (_mapped(cu_seqlens_q=[0, 33, 40, 47]), "33 queries"),
    "a window without a causal mask": (_mapped(window=4, causal=False), "window"),
    "more keys than there are": (_mapped(seqused_k=[33, 32, 7]), "seqused_k"),
    "pages without lengths": (_mapped(block_table=[[0]]), "layout"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_mapping_is_one_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "dump").mkdir()
    (damage, word), mapping = MISTAKES[name], in_rows(folder, made())
    damage(folder, mapping)
    with pytest.raises(UsageError) as said:
        export.main([str(tmp_path / "calls"), "--dump", str(written(tmp_path, mapping))])
    assert word in str(said.value)
    assert "\n" not in str(said.value)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"block_table": [[0, 1], [2, 128], [3, 4]]}, "page 128"),
        ({"block_table": [[0, 1], [2, -1], [3, 4]]}, "page -1"),
        ({"block_table": [[0], [2], [3]]}, "seqused_k"),
        ({"block_table": [0, 1]}, "block_table"),
        ({"block_table": [[0, 1], [2]]}, "block_table"),
        ({"seqused_k": [32, 32]}, "2 sequences"),
        ({"seqused_k": [32, 32, 0]}, "sequence 2"),
    ],
)
def test_so_is_one_about_pages(tmp_path: Path, fields: Mapping[str, Any], word: str) -> None:
    (folder := tmp_path / "dump").mkdir()
    mapping = {**in_pages(folder, made()), **fields}
    with pytest.raises(UsageError, match=word):
        export.main([str(tmp_path / "calls"), "--dump", str(written(tmp_path, mapping))])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of several kinds of file, its mapping and its folder of calls."""
    (folder := tmp_path_factory.mktemp("bytes") / "dump").mkdir()
    mapping = {**in_pages(folder, made()), **{name: x for name, x in in_rows(folder, made()).items() if name == "lse"}}
    mapping["lse"] = mapping["lse"].replace("{layer}", "03")
    np.save(folder / "o.npy", packed(made(), "o").flatten(1).float().numpy())
    written(folder.parent, {**mapping, "o": "o.npy", "dtype": "bf16"})
    assert export.main([str(folder.parent / "calls"), "--dump", str(folder.parent / "dump.toml")]) == 0
    return folder.parent


def _flipped(path: Path, at: float, byte: int) -> bytes:
    """Change a byte of a file; what it was."""
    content = path.read_bytes()
    place = int(at * len(content))
    path.write_bytes(content[:place] + bytes([content[place] ^ byte]) + content[place + 1 :])
    return content


SOURCES = ("dump.toml", "dump/step7.pt", "dump/step7.safetensors", "dump/l_03.safetensors", "dump/o.npy")


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255), name=st.sampled_from(SOURCES))
@example(at=0.0, byte=1, name=SOURCES[1])
def test_a_changed_byte_of_a_dump_is_one_line_or_another_number(whole: Path, at: float, byte: int, name: str) -> None:
    content, said, again = _flipped(whole / name, at, byte), "", whole / "again"
    try:
        export.main([str(again), "--dump", str(whole / "dump.toml")])
        assert store.load(again / MANIFEST, Calls).calls
    except UsageError as error:
        said = str(error)
    finally:
        (whole / name).write_bytes(content)
        there = again.exists()
        shutil.rmtree(again, ignore_errors=True)
    assert bool(said) != there
    assert "\n" not in said


@settings(max_examples=40, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255), number=st.integers(0, 1))
def test_a_changed_byte_of_a_dump_s_calls_is_seen(whole: Path, at: float, byte: int, number: int) -> None:
    name = sorted(path.name for path in (whole / "calls").glob("inputs-*"))[number]
    content = _flipped(whole / "calls" / name, at, byte)
    try:
        backend.opened.cache_clear()
        (fault,) = backend.opened(str(whole / "calls")).faults()
        assert name in fault
    finally:
        (whole / "calls" / name).write_bytes(content)


#: Ways of damaging the calls of a dump, beside those of any folder of calls (test_files.py): none passes.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "an input is gone": lambda folder: next(folder.glob("inputs-*")).unlink(),
    "an input is cut short": lambda folder: runner.replace(next(folder.glob("inputs-*")), b"1234"),
    "an input is another layer's": lambda folder: shutil.copy(*sorted(folder.glob("inputs-*"))),
    "an output is its neighbour's": lambda folder: shutil.copy(*sorted(folder.glob("*.out.*"))),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_of_a_dump_s_calls_passes(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = shutil.copytree(whole / "calls", tmp_path / "calls")
    DAMAGES[name](folder)
    code = cli.main(["judge", str(folder), "-n", "0", "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert (code, said.out[:4]) == (1, "FAIL") or (code, said.out, str(folder) in said.err) == (2, "", True)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of one engine that trains, and of some that serve."""
    sequences = {
        "train": made([(40, 40)] * 4),
        "same": made([(40, 40)] * 4, plan="flash@fused,tile=32"),
        "near": made([(40, 40)] * 4, apart=0.1),
        "cut": made([(40, 40)] * 4, plan="flash@fused,o=bf16:rtz", apart=0.1),
    }
    folder = tmp_path_factory.mktemp("engines")
    return {name: str(exported(folder / name, in_rows, x)) for name, x in sequences.items()}


def test_two_engines_with_one_input_are_a_pair(engines: Mapping[str, str]) -> None:
    assert pair(engines["train"], engines["train"]).severity == SAME
    found = pair(engines["train"], engines["same"])
    assert (found.severity, found.ok, found.calls[0].inputs) == (ROUNDINGS, True, {})
    assert found.calls[0].lse is not None
    assert abs(found.calls[0].lse.mean or 1.0) < 1e-5
    assert found.sides[0].known


@pytest.mark.parametrize(("name", "severity"), [("near", ROUNDINGS), ("cut", APART)])
def test_what_exact_attention_makes_of_own_inputs_is_no_difference_of_engines(
    engines: Mapping[str, str], name: str, severity: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([engines["train"], engines[name]]) == (severity == APART)
    assert "  inputs " in capsys.readouterr().out
    found = pair(engines["train"], engines[name])
    assert found.severity == severity
    assert {part for part, share in found.calls[0].inputs.items() if 0.09 < share < 0.11} == {"q"}
    assert found.calls[0].lse is not None
    assert abs(found.calls[0].lse.mean or 1.0) < 1e-5


def test_engines_whose_values_are_all_0_as_in_a_run_that_warms_up_are_a_pair(tmp_path: Path) -> None:
    folders = []
    for apart in (0.0, 0.1):
        sequences = made([(40, 40)] * 4, apart=apart)
        for each in sequences:
            each["v"].zero_()
            each["o"].zero_()
        folders.append(str(exported(tmp_path / str(apart), in_rows, sequences)))
    found = pair(*folders)
    assert (found.severity, list(found.calls[0].inputs)) == (SAME, ["q"])


def test_an_engine_is_held_against_a_kernel_that_is_here_and_a_damaged_one_is_refused(
    engines: Mapping[str, str], tmp_path: Path
) -> None:
    found = pair(engines["cut"], "flash@fused")
    assert (found.severity, [call.case for call in found.calls]) == (APART, ["captured[step=000000.layer=3]"])
    damaged = shutil.copytree(engines["train"], tmp_path / "damaged")
    (damaged / "0001.out.safetensors").unlink()
    with pytest.raises(UsageError, match="0001"):
        pair(str(damaged), engines["train"])
    other = exported(tmp_path / "other", in_heads, made([(9, 9)]))
    found = pair(str(other), engines["train"])
    assert not found.ok
    assert "9, 16" in found.calls[0].why


def test_a_log_sum_exp_that_is_none_fails_and_one_in_base_two_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-n", "0", "--out", str(tmp_path / "out"))
    for name, change, code in (("binary", 1.0 / math.log(2.0), 0), ("other", 0.9, 1), ("NaN", math.nan, 1)):
        sequences = made([(40, 40)])
        sequences[0]["lse"] *= change
        folder = exported(tmp_path / name, in_rows, sequences)
        capsys.readouterr()
        assert judge.main([str(folder), *words]) == code
        assert ("log-sum-exp" in capsys.readouterr().out) == bool(code)
