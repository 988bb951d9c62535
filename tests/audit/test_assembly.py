"""Assembly text as instructions: what the compiler's own texts, which the gate reads, leave untried."""

import pytest

from tiebreak.laboratory.audit.assembly import Code


def test_ptx_without_guards_braces_comments_labels_and_directives() -> None:
    text = """
.visible .entry k(
	.param .u64 k_param_0
)
.reqntid 128
{
	.reg .b32 	%r<9>;
$L__BB0_1:                              // %loop
	ld.param.b64 	%rd1, [k_param_0];
	// begin inline asm
	{ @!%p1 mul.f32 %r2, %r1, 0f3F800000; }  // mul.f32 of no one
	// end inline asm
	add.f32 	%r3, %r2, %r1; sub.f32 %r4, %r3, %r1;
	ret;
}
"""
    instructions = Code(text, "ptx").instructions
    assert [at.opcode for at in instructions] == ["ld.param.b64", "mul.f32", "add.f32", "sub.f32", "ret"]
    assert instructions[1].operands == ("%r2", "%r1", "0f3F800000")


@pytest.mark.parametrize(
    ("dialect", "text", "source"),
    [
        ("amdgcn", "v_mul_f32 v1, v0, v0\nv_add_f32 v1, v0, v0 ; v_exp_f32 v1, v0\nv_exp_f32_e32 v2, v1", 1),
        ("amdgcn", "v_exp_f32 v1, v0\nv_mov_b32_e32 v12, 6\nv_mov_b32_e32 s1, 6\nv_exp_f32_e32 v3, v1", 0),
        ("amdgcn", "v_mul_f32 v1, v0, v0\nglobal_store_dword v1, v0, s[0:1]\nv_exp_f32_e32 v2, v1", 0),
        ("amdgcn", "v_mul_f32 v1, v0, v0\nds_write_b32 v1, v0\nv_exp_f32_e32 v2, v1", 0),
        ("ptx", "mul.f32 %r1, %r0, %r0;\nst.shared.b32 [%r1], %r0;\nex2.approx.f32 %r2, %r1;", 0),
    ],
    ids=["last write", "common start", "store", "LDS store", "store ptx"],
)
def test_a_value_comes_from_the_last_write_above(dialect: str, text: str, source: int) -> None:
    assert Code(text, dialect).instructions[-1].sources == (source,)


@pytest.mark.parametrize("dialect", ["ptx", "amdgcn"])
def test_what_the_compiler_added_belongs_to_what_it_was_added_to(dialect: str) -> None:
    sign = {"ptx": "//", "amdgcn": ";"}[dialect]
    text = f".loc 1 40 5 {sign} k.py:40:5\nmul.f32 %r1, %r0, %r0\n.loc 1 0 5 {sign} k.py:0:5\nadd.f32 %r1, %r0, %r0"
    assert [at.place for at in Code(text, dialect).instructions] == [((40, 5),), ((40, 5),)]
