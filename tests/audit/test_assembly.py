"""Assembly text as instructions: operands, where values come from, places in the source."""

import pytest

from tiebreak.programs.audit.assembly import Code


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


def test_amdgcn_without_encodings_comments_and_labels() -> None:
    text = """
.LBB0_2:                                ; %loop
	v_exp_f32_e32 v1, v0                    ; v_add_f32 of no one
	v_and_b32_sdwa v2, v1, v3 dst_sel:DWORD src0_sel:WORD_1
	v_fma_f32 v4, -v1, |v2|, s[2:3]
	.amdhsa_float_round_mode_32 0
"""
    instructions = Code(text, "amdgcn").instructions
    assert [at.opcode for at in instructions] == ["v_exp_f32", "v_and_b32", "v_fma_f32"]
    assert instructions[2].sources == (0, 1)


@pytest.mark.parametrize(
    ("dialect", "text", "source"),
    [
        ("amdgcn", "v_mul_f32 v1, v0, v0\nv_add_f32 v1, v0, v0\nv_exp_f32_e32 v2, v1", 1),
        ("amdgcn", "v_exp_f32 v1, v0\nv_mov_b32_e32 v12, 6\nv_mov_b32_e32 s1, 6\nv_exp_f32_e32 v3, v1", 0),
        ("amdgcn", "v_pk_mul_f32 v[4:5], v[0:1], v[2:3]\nv_exp_f32_e32 v9, v5", 0),
        ("amdgcn", "v_mul_f32 v1, v0, v0\nglobal_store_dword v1, v0, s[0:1]\nv_exp_f32_e32 v2, v1", 0),
        ("amdgcn", "v_mul_f32 v1, v0, v0\nds_write_b32 v1, v0\nv_exp_f32_e32 v2, v1", 0),
        ("ptx", "mov.b32 %r1, 5;\nmov.b32 %r12, 6;\nadd.s32 %r3, %r12, %r0;", 1),
        ("ptx", "ld.shared.v2.b32 {%r1, %r2}, [%r0];\nmov.b64 %rd1, {%r9, %r2};", 0),
        ("ptx", "mul.f32 %r1, %r0, %r0;\nst.shared.b32 [%r1], %r0;\nex2.approx.f32 %r2, %r1;", 0),
    ],
    ids=["last write", "common start", "range", "store", "LDS store", "common start ptx", "list", "store ptx"],
)
def test_a_value_comes_from_the_last_write_above(dialect: str, text: str, source: int) -> None:
    assert Code(text, dialect).instructions[-1].sources == (source,)


PTX = """
	.loc	1 40 5                          // kernel.py:40:5
	mul.f32 	%r1, %r0, %r0;
	.loc	1 0 5                           // kernel.py:0:5
	mul.f32 	%r1, %r0, %r0;
	.loc	2 14 9, function_name $L__info_string0, inlined_at 1 41 7 // helper.py:14:9
	add.f32 	%r2, %r0, %r1;
	.loc	3 3 1, function_name $L__info_string1, inlined_at 2 14 9 // deep.py:3:1
	sub.f32 	%r3, %r2, %r1;
"""
AMDGCN = """
	.loc	1 40 5 is_stmt 1                ; kernel.py:40:5
	v_mul_f32 v1, v0, v0
	.loc	1 0 5                           ; kernel.py:0:5
	v_mul_f32 v1, v0, v0
	.loc	2 14 9                          ; helper.py:14:9 @[ kernel.py:41:7 ]
	v_mul_f32 v1, v0, v0
	.loc	3 3 1                           ; deep.py:3:1 @[ helper.py:14:9 @[ kernel.py:41:7 ] ]
	v_mul_f32 v1, v0, v0
"""


@pytest.mark.parametrize(("dialect", "text"), [("ptx", PTX), ("amdgcn", AMDGCN)])
def test_places_have_the_chain_of_calls_and_what_the_compiler_added_that_of_what_it_was_added_to(
    dialect: str, text: str
) -> None:
    places = [at.place for at in Code(text, dialect).instructions]
    assert places == [((40, 5),), ((40, 5),), ((41, 7), (14, 9)), ((41, 7), (14, 9), (3, 1))]
