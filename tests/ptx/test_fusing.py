"""Packed sums are fused as ptxas 12.9 and 13.0 fuse them: each row was assembled and disassembled."""

import pytest

from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.fusing import fused
from tiebreak.backends.ptx.parsing import parsed

KERNEL = """.visible .entry k(.param .u64 p) {{ .reg .b64 %rd<19>; .reg .b32 %r<19>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [p]; mul.rn.f32x2 %rd5, %rd2, %rd3; {body} st.global.b64 [%rd1], %rd6; ret; }}"""
OTHER = "mul.rn.f32x2 %rd7, %rd4, %rd8;"


@pytest.mark.parametrize(
    ("body", "sums"),
    [
        ("add.rn.f32x2 %rd6, %rd5, %rd4;", ["fma.rn.f32x2 %rd6 %rd2 %rd3 %rd4"]),
        ("add.rn.f32x2 %rd6, %rd4, %rd5;", ["fma.rn.f32x2 %rd6 %rd2 %rd3 %rd4"]),
        ("sub.rn.f32x2 %rd6, %rd5, %rd4;", ["fms.rn.f32x2 %rd6 %rd2 %rd3 %rd4"]),
        ("sub.rn.f32x2 %rd6, %rd4, %rd5;", ["fnma.rn.f32x2 %rd6 %rd2 %rd3 %rd4"]),
        (f"{OTHER} add.rn.f32x2 %rd6, %rd7, %rd5;", ["fma.rn.f32x2 %rd6 %rd4 %rd8 %rd5"]),
        (
            "add.rn.f32x2 %rd6, %rd5, %rd4; add.rn.f32x2 %rd9, %rd5, %rd8;",
            ["fma.rn.f32x2 %rd6 %rd2 %rd3 %rd4", "fma.rn.f32x2 %rd9 %rd2 %rd3 %rd8"],
        ),
        # A product that is needed by itself stays one; of two the other then goes into the sum.
        ("add.rn.f32x2 %rd6, %rd5, %rd4; st.global.b64 [%rd1], %rd5;", []),
        (f"{OTHER} add.rn.f32x2 %rd6, %rd5, %rd7; st.global.b64 [%rd1], %rd5;", ["fma.rn.f32x2 %rd6 %rd4 %rd8 %rd5"]),
        (
            f"{OTHER} add.rn.f32x2 %rd6, %rd5, %rd7; add.rn.f32x2 %rd9, %rd7, %rd2;",
            ["fma.rn.f32x2 %rd6 %rd2 %rd3 %rd7"],
        ),
        ("add.rn.f32x2 %rd6, %rd5, %rd5;", []),
        ("mov.b64 %rd2, %rd4; add.rn.f32x2 %rd6, %rd5, %rd4;", []),  # not asked of ptxas: its operand has gone
        ("@%p1 bra $L; add.rn.f32x2 %rd6, %rd5, %rd4; $L:", []),
    ],
)
def test_packed_products_go_unrounded_into_sums(body: str, sums: list[str]) -> None:
    entry = parsed(KERNEL.format(body=body))
    made = fused(entry.instructions, set(entry.labels.values()))
    changed = [new for old, new in zip(entry.instructions, made, strict=True) if new is not old]
    assert [" ".join([new.opcode, *map(str, new.operands)]) for new in changed] == sums
    Program(KERNEL.format(body=body), "sm_120/13.0")
