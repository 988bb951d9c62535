"""The compiler as the audit calls it: no GPU, nothing inherited; the reader's hardest question put to real assembly.

Which casts are P̄'s and which are O's is settled by compiling kernels that have only one of them.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP32, Format, Rounding
from tiebreak.kernels.plans import Cast, RoundingPlan
from tiebreak.kernels.triton.config import Config
from tiebreak.laboratory.audit import compiling
from tiebreak.laboratory.audit.compiling import TARGETS, Compilation, compilations, compile_for, sources
from tiebreak.laboratory.audit.reading import read
from tiebreak.laboratory.audit.records import Audit

if (reason := compiling.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

CASTS = {"sm_90": {"cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"}, "gfx942": {"v_add3_u32 0x7fff + last bit"}}


def source(name: str, **changes: Cast) -> Compilation:
    """A kernel of the roster in small blocks, with other casts."""
    compilation = next(compilation for compilation in sources() if compilation.name == name)
    config = compilation.constexprs["C"]
    assert isinstance(config, Config)
    plan: RoundingPlan = replace(config.plan, **changes)  # type: ignore[arg-type]
    signature = dict(compilation.signature)
    if "o" in changes:
        signature["O"] = {"bf16": "*bf16", "fp32": "*fp32"}[changes["o"].fmt.name]
    return replace(compilation, signature=signature, constexprs={"C": replace(config, plan=plan, block=Block(32, 16))})


def audit(target: str, compilation: Compilation) -> Audit:
    return read(target, compilation.name, compile_for(TARGETS[target], compilation), TARGETS[target].assembly)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("p_bar", "o"), [(BF16, FP32), (FP32, BF16)])
def test_with_one_cast_alone_it_is_found_in_its_place(target: str, p_bar: Format, o: Format) -> None:
    report = audit(target, source("triton_flash/forward", p_bar=Cast(p_bar), o=Cast(o)))
    for fmt, casts in ((p_bar, report.operand_casts), (o, report.output_casts)):
        assert bool(casts) == (fmt == BF16)
        assert CASTS[target].issuperset(casts)


ENVIRONMENT = {
    "TRITON_DEFAULT_FP_FUSION": "1",
    "TRITON_DISABLE_LINE_INFO": "1",
    "TRITON_INTERPRET": "1",
    "TRITON_OVERRIDE_ARCH": "sm80",
    "TRITON_FORCE_DISABLE_FP_FUSION": "1",
}


def test_contraction_is_what_the_source_says_and_the_environment_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import knobs

    separate = source("triton_flash/query_gradient")
    assert not separate.options["enable_fp_fusion"]
    contracting = replace(separate, options={**separate.options, "enable_fp_fusion": True})
    before = audit("sm_90", separate), audit("sm_90", contracting)
    assert [each.contraction for each in before] == [(), ("left to ptxas",)]
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert (audit("sm_90", separate), audit("sm_90", contracting)) == before
    assert knobs.compilation.disable_line_info, "what is pinned is as before afterwards"
    assert knobs.runtime.add_stages_inspection_hook is None


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_ties_that_go_away_are_rounded_by_integers(target: str) -> None:
    away = Cast(BF16, Rounding.RTNA)
    report = audit(target, source("triton_flash/forward", p_bar=away))
    assert [cast.partition(";")[0] for cast in report.operand_casts] == ["integer add, cut to bf16"]
    assert not any("integer add" in cast for cast in report.output_casts)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    def gone(knob: object, path: object = None) -> None:
        raise RuntimeError("Cannot find ptxas")

    for version in ("3.8.0", "3.9.0+git1"):
        monkeypatch.setattr(compiling, "installed", lambda version=version: version)
        assert compiling.unavailable() is None
    monkeypatch.setattr(knobs.env_nvidia_tool, "transform", gone)
    assert str(compiling.unavailable()).startswith("Cannot find ptxas: ")
    monkeypatch.setattr(compiling, "installed", lambda: "3.7.1")
    assert str(compiling.unavailable()).startswith("triton 3.7.1 does not record")
    monkeypatch.setattr(compiling, "missing", lambda: "triton is not installed")
    assert compiling.unavailable() == "triton is not installed"


def test_every_plan_and_every_shift_rule_is_audited() -> None:
    def kinds(some: Iterable[Compilation]) -> set[object]:
        configs = [each.constexprs["C"] for each in some]
        plans = {config.plan for config in configs if isinstance(config, Config)}
        return plans | {config.shift for config in configs if isinstance(config, Config)}

    assert kinds(sources()) == kinds(compilations())
