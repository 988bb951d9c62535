"""`tiebreak pair`: sides, calls, what separates them, the verdict, the command."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from msgspec import convert, structs

import tiebreak
from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.defects.kernel import SOUND
from tiebreak.defects.planted import DEFECTS, users
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Kernel, composed
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.identity import Identity
from tiebreak.matrix.identification.settling import UnidentifiedError
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.pairs.judgement import apply_limits, judge_pair
from tiebreak.matrix.workbench import Settings
from tiebreak.programs import pair as program
from tiebreak.reports import cli
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs.log_probabilities import (
    FormatRecord,
    LogProbabilityDifference,
    ModelRecord,
    ReadingComparison,
)
from tiebreak.reports.pairs.verdict import APART, ROUNDINGS, SAME, CallRecord, PairVerdict, headlined, statement
from tiebreak.reports.records.record import UNDECIDED, Estimate
from tiebreak.reports.records.store import as_text
from tiebreak.reports.schemas import schema_of

pytestmark = pytest.mark.usefixtures("one_thread")
FUSED = parse_declaration("flash@fused,tile=64")
SOME = ("random_odd", "sink_tie", "no_tail")


def _emulated(plan: str) -> Side:
    declaration = parse_declaration(plan)
    return Side(plan, EMULATION, composed(plan, declaration), declaration, known=True)


def _native(kernel: Kernel, plan: str | None = "flash@fused,tile=64", *, known: bool = True) -> Side:
    return Side(kernel.name, CPU, kernel, parse_declaration(plan) if plan else None, known, "as told")


def _sound(name: str = "tiled", **switches: object) -> Side:
    return _native(users(partial(SOUND[name], **switches), name))


def _judged(a: Side, b: Side, *cases: str, heads: int = 64) -> PairVerdict:
    return judge_pair((a, b), BF16, cases or SOME, Settings(1, heads), lambda line: None, None)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (_sound(), _sound("any_order", tile=32)),
        (_sound(tile=16), _emulated("split@fused,splits=2")),
        (_emulated("flash@fused,base=2"), _emulated("flash@fused,tile=32")),
        (_emulated("dithered@fused,tile=32"), _emulated("dithered@fused,base=2")),
    ],
    ids=lambda side: side.name,
)
def test_two_renderings_of_one_plan_are_two_roundings(a: Side, b: Side) -> None:
    found = _judged(a, b)
    assert found.severity in (ROUNDINGS, SAME), found.headline
    assert found.ok
    assert min(call.bits for call in found.calls if call.bits is not None) > 0.9


def test_one_kernel_has_the_same_bits_as_itself_and_nothing_separates_it() -> None:
    found = _judged(_sound(), _sound())
    assert (found.severity, found.separation) == (SAME, ())
    assert found.headline == "PASS: tiled on cpu and tiled on cpu [bf16]: bitwise equal on 3 inputs"


@pytest.mark.parametrize(
    ("defect", "case", "said"),
    [
        ("scaled_twice", "sink_tie", "B is another function: scores are scaled twice"),
        ("sink_dropped", "sink_at_maximum", "B is another function: "),
        ("causal_upper_left", "random_causal_chunk", "B is another function: the causal mask is "),
        ("unscaled_dk", "sink_tie", "gradients of B are wrong, by "),
        ("blind_rows_nan", "wholly_masked", "B differs from the exact answer in what is NaN or Inf, in "),
    ],
)
def test_another_function_is_apart_and_named(defect: str, case: str, said: str) -> None:
    found = _judged(_sound(), _native(DEFECTS[defect].kernel), case, heads=16)
    assert found.severity == APART
    assert not found.ok
    assert found.headline.startswith(f"FAIL: tiled and {defect} [bf16]: apart on 1 of 1 input ({case}: {said}")
    assert found.calls[0].wrong
    assert DEFECTS[defect].slip in found.headline


def test_the_first_line_names_a_mistake_where_one_input_shows_it() -> None:
    found = _judged(_sound(), _native(DEFECTS["causal_upper_left"].kernel), "random_causal_chunk", "window_cuts_tie")
    assert "apart on 2 of 2 inputs (random_causal_chunk: B is another function: the causal mask is" in found.headline


def test_a_bias_has_its_sign_and_what_makes_it_is_named() -> None:
    """l in bf16 rounds 2 + 1e-6 to 2: what the last tokens add no longer breaks the tie, and O is too large again."""
    found = _judged(_emulated("flash@fused"), _emulated("flash@fused,l=input"))
    calls = {call.case: call for call in found.calls}
    assert found.severity == APART
    assert "B - A is biased, +0.4" in found.headline
    assert re.search(r"; from the exact answer A is -0\.2\d\d off, B \+0\.2\d\d\)$", found.headline)
    assert calls["sink_tie"].verdict == "biased"
    assert calls["no_tail"].severity == SAME
    assert {(each.a, each.b, each.share) for each in found.separation} == {("l=fp32", "l=input", 1.0)}
    assert "  separated by l=fp32 in A, l=input in B: 100 % of the difference on sink_tie" in str(found).splitlines()


def test_what_makes_the_bias_is_told_from_what_differs_on_normal_numbers() -> None:
    """P̄ in 16 bits is nearly all of it there; a fast exponential alone decides how ties break."""
    ties = "tied_maxima_positive_v"
    found = _judged(_emulated("flash@fused_fast_exp"), _emulated("flash@fp32_inside"), "random", ties)
    first, second, *_ = found.separation
    assert f"[bf16]: apart on 1 of 2 inputs ({ties}: B - A is biased, -0.2" in found.headline
    assert (first.a, first.on, first.share) == ("base=e (fast)", ties, 1.0)
    assert (second.a, second.on) == ("p_bar=input", "normal numbers")
    assert second.share > 0.9


def test_a_difference_is_measured_as_both_plans_predict_it_and_the_nearer_one_is_known() -> None:
    a, b = _sound(tile=32), _emulated("flash@all_bf16,tile=32")
    call = _judged(a, b, "random_odd").calls[0]
    assert call.rms == pytest.approx(call.predicted, rel=0.1)
    assert call.rms is not None
    assert call.rms > 0.3
    assert call.nearer == "A"
    assert _judged(b, a, "random_odd").calls[0].nearer == "B"


def test_points_that_change_no_bit_are_left_out_and_the_others_add_up() -> None:
    """q times 1/8, of 64 columns, is exact; a row of 128 keys is one tile."""
    found = _judged(_emulated("flash@fused,tile=128"), _emulated("standard,s=input,q=input"), "random", "sink_tie")
    assert {each.a.partition("=")[0] for each in found.separation} == {"algorithm", "s"}
    shares = [sum(each.share for each in found.separation if each.on == on) for on in ("sink_tie", "normal numbers")]
    assert shares == pytest.approx([1.0, 1.0])


def test_what_excludes_another_point_goes_with_it() -> None:
    found = _judged(_emulated("flash@fused,shifted=input,tile=64"), _emulated("flash@fused_contracted,tile=64"))
    assert any("shifted=input" in each.a for each in found.separation)
    assert {each.on for each in found.separation} == {"no_tail", "normal numbers"}
    assert sum(each.share for each in found.separation) == pytest.approx(2.0)


def test_an_error_that_no_plan_predicts_is_apart_though_it_has_no_bias() -> None:
    def noisy(sound: Callable[..., torch.Tensor], o: torch.Tensor, request: object) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(o.numel()).view(o.shape) % 2)
        return sound(o * (1 + signs * 2.0**-8), request)

    found = _judged(_sound(), _sound(stored=noisy), "random")
    assert found.severity == APART
    assert "times what both plans' errors add up to (at least " in found.headline


def test_without_a_plan_nothing_is_predicted_and_a_nearest_one_is_called_an_assumption() -> None:
    unknown = _judged(_sound(), replace(_sound(tile=16), plan=None, known=False), "random")
    assert (unknown.severity, unknown.ok, unknown.separation) == (UNDECIDED, False, ())
    nearest = _judged(_sound(), replace(_native(SOUND_STANDARD, "standard"), known=False), "random")
    assert "if these were the plans: one is not known" in str(nearest)


SOUND_STANDARD = users(partial(SOUND["tiled"], tile=128), "untiled")


def test_a_declared_plan_is_held_to_its_bits() -> None:
    told = replace(_sound(), rests_on="declared")
    assert "declared, 99.99 % of bits" in _judged(told, _sound(), "random").sides[0].rests_on
    wrong = _judged(replace(told, plan=parse_declaration("flash@all_bf16")), _sound(), "random").sides[0]
    assert not wrong.known
    assert wrong.rests_on.endswith("of bits on this machine on 1 input, which is not followed")


def test_what_a_side_refuses_is_skipped_and_what_it_raises_is_not() -> None:
    def raises(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of order")

    found = _judged(_sound("cached"), _sound(), "window_cuts_tie", "random")
    assert [call.severity for call in found.calls] == [None, SAME]
    assert "  not compared window_cuts_tie: A: cached takes no sliding window" in str(found).splitlines()
    found = _judged(_sound(), _sound(output=raises), "random")
    assert (found.severity, found.ok) == (UNDECIDED, False)
    assert "B raised RuntimeError: out of order" in found.headline
    with pytest.raises(UsageError, match="nothing can be compared: A: cached takes no sliding window"):
        _judged(_sound("cached"), _sound(), "window_cuts_tie")


def test_heads_that_do_not_settle_it_are_said() -> None:
    found = _judged(_emulated("flash@fused"), _emulated("flash@all_bf16"), "random_scaled", heads=2)
    assert found.severity == UNDECIDED
    assert "16 heads do not settle it: --heads " in found.headline


def test_a_change_that_one_side_alone_withstands_is_named() -> None:
    """PyTorch's own product adds one row up in another order than many."""
    found = _judged(_emulated("flash@fused"), _sound(), "no_tail", "invariance[decode]", heads=2)
    assert found.invariant == {"invariance[decode]": (True, False)}
    assert "  only A       keeps its bits: invariance[decode]" in str(found).splitlines()


def test_the_headline_names_the_bias_that_is_largest_for_certain() -> None:
    sizes = {"wide": (0.4, 0.3), "sure": (-0.3, 0.1), "unbiased": (0.9, 1.0)}
    calls = [
        CallRecord(name, APART, name, difference=Estimate(*size), verdict="undecided" if size[1] == 1.0 else "biased")
        for name, size in sizes.items()
    ]
    assert headlined(calls).case == "sure"


def _model(equal: float, **numbers: float | tuple[float, ...] | None) -> ModelRecord:
    none = dict.fromkeys(("largest", "k1", "k3", "beyond_1_percent", "beyond_20_percent"), 0.0)
    empty = dict.fromkeys(("by_position", "by_layer", "equal_by_layer"), ())
    plain = {"tokens": 9, "equal": equal, "mean": Estimate(0.0, 0.0), "rms": 0.03, **none, **empty, **numbers}
    apart = convert(plain, LogProbabilityDifference)
    exact = [ReadingComparison("exact", side, "exact", apart) for side in "AB"]
    return ModelRecord("a", "b", "m", (FormatRecord("bf16", (ReadingComparison("A", "B", "pair", apart), *exact)),))


def test_the_same_bits_in_calls_and_not_through_a_model_are_not_told() -> None:
    same = [CallRecord("random", SAME, "")]
    assert statement(same, _model(1.0))[0] == SAME
    assert statement(same, _model(0.5))[0] == UNDECIDED
    # NaN through the model passes nothing, whatever the calls came to.
    for calls in (same, [CallRecord("random", ROUNDINGS, "")]):
        assert statement(calls, _model(0.5, rms=None))[0] == UNDECIDED


def test_a_limit_that_is_passed_or_not_known_fails() -> None:
    found = structs.replace(_judged(_sound(), _sound(), "random"), model=_model(1.0, largest=None))
    assert apply_limits(found, {"rms": 0.04}) is found
    for limits, said in (({"rms": 0.02}, "rms is 0.03, 0.02 is allowed"), ({"largest": 9.0}, "largest is not known")):
        failed = apply_limits(found, limits)
        assert not failed.ok
        assert f"; beyond a limit: {said}" in failed.headline


KERNEL = """
import tiebreak

@tiebreak.kernel(plan="standard,qk=input", backward="none")
def eager(q, k, v):
    return ((q @ k.mT) * q.shape[-1] ** -0.5).float().softmax(-1).to(q.dtype) @ v

def silent(q, k, v):
    return eager(q, k, v)
"""
FEW = ("--cases", "no_tail,sink_tie", "--heads", "16", "--model", "none")


def _unknown(kernel: ProbedKernel, *_: object) -> Identity:
    raise UnidentifiedError("it is not deterministic")


def test_the_verdict_comes_first_and_files_have_all_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pair", "mine.py:eager", "standard,qk=input", *FEW, "--json", "it.json", "--markdown", "it.md"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("PASS: mine.py:eager and standard,qk=input [bf16]: t")
    assert printed[1].startswith("  A            mine.py:eager on cpu: standard,qk=input (declared, ")
    assert printed[2] == "  B            standard,qk=input on emulation: standard,qk=input (declared)"
    plain = json.loads((folder / "it.json").read_text())
    jsonschema.Draft202012Validator(schema_of("pair")).validate(plain)
    assert plain["command"].startswith("tiebreak pair mine.py:eager standard,qk=input --cases ")
    assert [call["case"] for call in plain["calls"]] == ["no_tail", "sink_tie"]
    assert "| sink_tie |" in (folder / "it.md").read_text().replace("sink_tie  ", "sink_tie")
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["it.json", "it.md", "mine.py"]


MODEL = _model(0.5, by_position=(0.01, 0.02), by_layer=(0.1,), equal_by_layer=(0.5,))


def test_a_kept_pair_is_shown_again_and_has_its_place_on_the_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = structs.replace(_judged(_sound(), _sound(tile=32), "random"), model=MODEL)
    (folder / "it.json").write_text(as_text(found))
    assert cli.main(["show", "it.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{found.headline}\n")
    assert "\n  in nats      bf16 rms 0.03, mean 0 +- 0\n" in shown
    assert cli.main(["show", "it.json", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("random,")
    assert cli.main(["page", "it.json", "-o", "page"]) == 0
    page = (folder / "page" / "index.html").read_text()
    assert page.index(found.headline) < page.index("bf16: how far log-probabilities are apart") < page.index("<svg")
    assert cli.main(["gate", "it.json", "it.json"]) == 2
    assert "what tiebreak pair says: tiebreak show and page take it" in capsys.readouterr().err


def test_json_alone_goes_to_the_terminal_and_apart_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pair", "sdpa_flash", "flash@all_bf16", *FEW, "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["severity"], found["ok"]) == (APART, False)
    assert [side["backend"] for side in found["sides"]] == ["cpu", "emulation"]
    assert cli.main(["pair", "flash@fused", "flash@fused", *FEW, "--backend", "emulation,cpu"]) == 0
    assert "  B            flash@fused on cpu: flash@fused (declared, " in capsys.readouterr().out


def test_functions_are_compared_and_one_kernel_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def asking(kernel: ProbedKernel, *_: object) -> Identity:
        asked.append(kernel.kernel.name)
        return _unknown(kernel)

    def silent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(program, "identify", asking)
    found = tiebreak.pair(silent, silent, cases="no_tail", heads=16, model="none")
    assert (asked, found.severity) == (["silent"], SAME)
    assert str(found).splitlines()[1] == "  A            silent on cpu: no plan (it is not deterministic)"
    tiebreak.pair(silent, "sdpa_flash", cases="no_tail", heads=16, model="none")
    assert asked == ["silent"] * 2


def test_what_takes_minutes_is_left_out_in_words_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(CPU, slower=15.0)
    monkeypatch.setattr(program, "matching_backends", lambda selection: [slow])
    monkeypatch.setattr(program, "CASES", ("no_tail", "invariance[decode]"))
    monkeypatch.setattr(program, "through_model", lambda *sides, **options: _model(1.0))
    found = tiebreak.pair("sdpa_flash", "sdpa_flash", backend="cpu", heads=16)
    assert (found.model, found.invariant) == (None, {})
    assert [line.split()[0:3] for line in str(found).splitlines()[-2:]] == [
        ["not", "asked", "invariance,"],
        ["not", "asked", "log-probabilities,"],
    ]
    asked = tiebreak.pair("sdpa_flash", "sdpa_flash", backend="cpu", heads=16, cases="no_tail", model="gpt2")
    assert asked.left_out == ()
    assert asked.model is not None


def test_inputs_that_the_nearest_plan_misses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all bits of most inputs and no known plan contradict each other."""
    missed, held_out = SimpleNamespace(worst={"few_keys": 0.5}), {"random": 1.0}
    nearly = SimpleNamespace(
        plan=None, nearest="flash@fused", share=1.0, evidence=CPU.evidence, held_out=held_out, explanation=missed
    )
    monkeypatch.setattr(program, "identify", lambda *_: nearly)
    found = tiebreak.pair(torch.nn.functional.scaled_dot_product_attention, "sdpa_flash", cases="no_tail", model="none")
    bits = "100.00 % of bits on this machine on 1 input"
    assert found.sides[0].rests_on == f"nearest, none is known: {bits}, not all of few_keys"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("flash@fuesd", "standard"), "tiebreak pair: flash@fuesd: "),
        (("absent.py:f", "standard"), "tiebreak pair: absent.py:f: cannot import absent.py: no such file: absent.py"),
        (("nothing", "standard"), "tiebreak pair: nothing: no adapter 'nothing'"),
        (("mine.py:eager", "standard", "--backend", "emulation"), "--backend emulation: a kernel of yours "),
        (("standard", "standard", "--backend", "cpu,emulation,cpu"), "--backend cpu,emulation,cpu: expected one name "),
        (
            ("standard", "standard", "--backend", "interpreter", "--as", "sm_80,sm_90,exact"),
            "expected one name for both",
        ),
        (("standard", "standard", "--backend", "gpu"), "--backend: backend 'gpu' is called cuda"),
        (("standard", "standard", "--cases", "no_tial"), "--cases: unknown case 'no_tial': did you mean no_tail"),
        (("standard", "standard", "--cases", "invariance[batch]"), "nothing can be compared: --cases names no call"),
        (("standard", "standard", "--limit", "rsm=1", *FEW[:4]), "--limit rsm: expected mean, rms, "),
        (("standard", "standard", "--limit", "rms=1", *FEW), "--limit rms: expected "),
        (("standard", "standard", "--limit", "rms", *FEW), "argument --limit: rms: expected NAME=NUMBER"),
        (("standard", "standard", "--json", "absent/it.json"), "--json absent/it.json: there is no folder absent"),
        (("standard", "standard", "--model", "absent.py:f"), "--model absent.py:f: "),
        (("standard", "standard", "--figure", "it.svg", *FEW), "--figure: it is of the model's log-probabilities"),
        (("standard",), "the following arguments are required: B"),
    ],
)
def test_bad_usage_is_one_line(
    folder: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pair", *words]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["mine.py"]


def test_an_interrupted_pair_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "judge_pair", interrupted)
    assert cli.main(["pair", "standard", "standard", "--json", "it.json"]) == 130
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["mine.py"]
