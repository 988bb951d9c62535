"""How the assembly rounds, on snippets written by hand: every kind of instruction, and planted changes."""

import pytest

from tiebreak.laboratory.audit.reading import read
from tiebreak.laboratory.audit.records import Audit, differences

# A kernel in short. Line 10: scores, 20: softmax, 30: the last product, 40: division, 50: cast and store.
PTX = """
	.loc	1 10 1                          // k.py:10:1
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2}, {%r3, %r4}, {%r5}, {%r6, %r6};
	.loc	1 20 1                          // k.py:20:1
	mul.rn.f32 	%r7, %r1, %r9;
	sub.rn.f32 	%r10, %r7, %r8;
	ex2.approx.ftz.f32 	%r11, %r10;
	.loc	1 25 1                          // k.py:25:1
	cvt.rn.bf16x2.f32 	%r12, %r11, %r11;
	.loc	1 30 1                          // k.py:30:1
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r13, %r14}, {%r12, %r12}, {%r5}, {%r13, %r14};
	.loc	1 40 1                          // k.py:40:1
	div.full.f32 	%r20, %r13, %r15;
	lg2.approx.ftz.f32 	%r21, %r15;
	.loc	1 50 1                          // k.py:50:1
	cvt.rn.bf16x2.f32 	%r22, %r20, %r20;
	st.global.b32 	[%rd1], %r22;
"""
SETTINGS = "\t.amdhsa_float_round_mode_32 0\n\t.amdhsa_float_round_mode_16_64 0\n\t.amdhsa_float_denorm_mode_32 3\n"
# gfx942: no cast instruction, so integers round.
CDNA3 = """
	.loc	1 10 1                          ; k.py:10:1
	v_mfma_f32_32x32x8_bf16 v[0:15], v[60:61], v[62:63], 0
	.loc	1 20 1                          ; k.py:20:1
	v_mul_f32_e32 v20, v0, v70
	v_sub_f32_e32 v20, v20, v71
	v_exp_f32_e32 v20, v20
	.loc	1 5 1                           ; c.py:5:1 @[ k.py:25:1 ]
	v_bfe_u32 v21, v20, 16, 1
	s_movk_i32 s3, 0x7fff
	v_add3_u32 v21, v20, v21, s3
	v_cmp_u_f32_e32 vcc, v20, v20
	v_cndmask_b32_e32 v21, v21, v72, vcc
	s_mov_b32 s4, 0x7060302
	v_perm_b32 v22, v21, v21, s4
	.loc	1 30 1                          ; k.py:30:1
	v_mfma_f32_32x32x8_bf16 v[32:47], v[22:23], v[62:63], v[32:47]
	.loc	1 40 1                          ; k.py:40:1
	v_div_scale_f32 v50, s[0:1], v73, v73, v32
	v_rcp_f32_e32 v51, v50
	v_fma_f32 v52, -v50, v51, 1.0
	v_div_fmas_f32 v52, v52, v51, v50
	v_div_fixup_f32 v52, v52, v73, v32
	v_log_f32_e32 v53, v73
	.loc	1 5 1                           ; c.py:5:1 @[ k.py:50:1 ]
	v_bfe_u32 v54, v52, 16, 1
	v_add3_u32 v54, v52, v54, s3
	v_lshrrev_b32_e32 v54, 16, v54
	global_store_short v[80:81], v54, off
"""
CDNA4 = """
	.loc	1 20 1                          ; k.py:20:1
	v_pk_mul_f32 v[20:21], v[0:1], v[70:71]
	v_pk_add_f32 v[20:21], v[20:21], v[72:73]
	v_exp_f32_e32 v20, v20
	v_exp_f32_e32 v21, v21
	.loc	1 5 1                           ; c.py:5:1 @[ k.py:25:1 ]
	v_cvt_pk_bf16_f32 v22, v20, v21
	.loc	1 30 1                          ; k.py:30:1
	v_mfma_f32_32x32x16_bf16 v[32:47], v[22:25], v[62:65], v[32:47]
	.loc	1 50 1                          ; k.py:50:1
	v_rcp_f32_e32 v50, v73
	v_mul_f32_e32 v51, v32, v50
	v_cvt_pk_bf16_f32 v52, v51, v51
"""
KERNELS = {"ptx": PTX, "cdna3": CDNA3 + SETTINGS, "cdna4": CDNA4 + SETTINGS}


def audit(text: str, dialect: str) -> Audit:
    return read("target", "kernel", text, "ptx" if dialect == "ptx" else "amdgcn")


TCGEN05 = "tcgen05.mma.cta_group::1.kind::{} [ %r1 + 0 ], %rd1, %rd2, %r8, %p2;"


MFMA = "v_mfma_{} v[0:15], v[20:21], v[22:23], v[0:15]\n" + SETTINGS


@pytest.mark.parametrize(
    ("dialect", "instruction", "name"),
    [
        ("ptx", "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%r1}, {%r2}, %rd1, 0;",
         "wgmma k32 e4m3*e4m3 -> f32"),
        ("ptx", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r1};",
         "mma.sync k8 tf32*tf32 -> f32"),
        # D: f32, A and B: bf16; then f16; then a descriptor that nobody knows.
        ("ptx", f"mov.b32 %r8, 135267472;\n@%p1 {TCGEN05.format('f16')}", "tcgen05.mma k16 bf16*bf16 -> f32"),
        ("ptx", f"mov.b32 %r8, 135266320;\n{TCGEN05.format('f8f6f4')}", "tcgen05.mma k32 e4m3*e4m3 -> f32"),
        ("ptx", f"ld.param.b32 %r8, [p];\n{TCGEN05.format('f16')}", "tcgen05.mma kind::f16"),
        ("cdna3", MFMA.format("f32_32x32x8_bf16_1k"), "mfma k8 bf16*bf16 -> f32"),
        ("cdna3", MFMA.format("f32_32x32x16_fp8_bf8"), "mfma k16 fp8*bf8 -> f32"),
        ("cdna3", MFMA.format("scale_f32_32x32x64_f8f6f4"), "mfma k64 f8f6f4*f8f6f4 -> f32"),
    ],
)  # fmt: skip
def test_products(dialect: str, instruction: str, name: str) -> None:
    assert audit(instruction, dialect).products == (name,)


Plant = tuple[str, str]


ONE_CAST = "cvt.rn.bf16x2.f32 	%r12, %r11, %r11;"
O_CAST = "cvt.rn.bf16x2.f32 	%r22, %r20, %r20;"
O_ROUNDED = "v_bfe_u32 v54, v52, 16, 1\n	v_add3_u32 v54, v52, v54, s3\n"
CUT = "and.b32 	%r16, %r17, -65536;\n	mov.b32 	%r20, %r16;\n	"
RNE = "v_add3_u32 0x7fff + last bit"


@pytest.mark.parametrize(
    ("kernel", "change", "field", "value"),
    [
        # P̄'s cast
        ("ptx", (ONE_CAST, ONE_CAST.replace(".rn", ".rz")), "operand_casts", ("cvt.rz.bf16x2.f32",)),
        ("ptx", (ONE_CAST, "cvt.rn.satfinite.e4m3x2.f32 	%rs12, %r11, %r11;"), "operand_casts",
         ("cvt.rn.satfinite.e4m3x2.f32",)),
        ("ptx", (ONE_CAST, "prmt.b32 	%r12, %r11, %r11, 0x7632U;"), "operand_casts",
         ("prmt.b32 (upper half, truncated)",)),
        ("cdna3", ("v_add3_u32 v21, v20, v21, s3", "s_nop 0"), "operand_casts", ()),
        ("cdna3", ("v_perm_b32 v22, v21, v21, s4", "v_perm_b32 v22, v20, v20, s4"), "operand_casts",
         (RNE, "v_perm_b32 (upper half, truncated)")),
        ("cdna4", ("v_cvt_pk_bf16_f32", "v_cvt_sr_pk_bf16_f32"), "operand_casts", ("v_cvt_sr_pk_bf16_f32",)),
        # O's cast
        ("ptx", (O_CAST, "cvt.rs.bf16x2.f32 	%r22, %r20, %r20, %r23;"), "output_casts", ("cvt.rs.bf16x2.f32",)),
        ("ptx", (O_CAST, "add.s32 	%r17, %r20, %r18;\n	" + CUT + O_CAST), "output_casts",
         ("integer add, cut to bf16; cvt.rn.bf16x2.f32",)),
        ("ptx", (O_CAST, "add.rn.f32 	%r17, %r20, %r18;\n	" + CUT + O_CAST), "output_casts",
         ("cut to bf16 (truncated); cvt.rn.bf16x2.f32",)),
        ("cdna3", (O_ROUNDED, "v_add_u32_e32 v54, v52, v55\n	v_and_b32_e32 v54, 0xffff0000, v54\n"), "output_casts",
         ("integer add, cut to bf16",)),
        ("cdna3", (O_ROUNDED, "v_mov_b32_e32 v54, v52\n"), "output_casts", ("v_lshrrev_b32 (upper half, truncated)",)),
        # exponential, division, logarithm
        ("ptx", ("ex2.approx.ftz.f32", "ex2.approx.f32"), "flushes", ("lg2",)),
        ("ptx", ("div.full.f32 	%r20, %r13, %r15", "rcp.approx.ftz.f32 	%r20, %r15"), "division",
         ("rcp.approx.ftz.f32",)),
        ("cdna3", ("v_rcp_f32_e32 v51, v50", "v_rcp_f32_e32 v51, v50\n	v_rcp_f32_e32 v59, v50"), "division",
         ("v_div_scale/fmas/fixup_f32", "v_rcp_f32")),
        # contraction
        ("ptx", ("sub.rn.f32 	%r10, %r7, %r8", "fma.rn.f32 	%r10, %r1, %r9, %r8"), "exponent", ("fma",)),
        ("ptx", ("mul.rn.f32", "mul.f32"), "contraction", ("left to ptxas",)),
        ("cdna4", ("v_pk_add_f32 v[20:21], v[20:21], v[72:73]", "v_pk_fma_f32 v[20:21], v[0:1], v[70:71], v[72:73]"),
         "exponent", ("fma",)),
        # modes
        ("ptx", ("mul.rn.f32", "mul.rz.f32"), "mode", "RNE, rz"),
        ("cdna3", ("round_mode_32 0", "round_mode_32 3"), "mode", "RTZ, fp16 RNE"),
        ("cdna3", ("round_mode_16_64 0", "round_mode_16_64 1"), "mode", "RNE, fp16 up"),
        ("cdna3", ("v_exp_f32", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3\n	v_exp_f32"), "mode",
         "RNE; hwreg(HW_REG_MODE, 0, 2) 3"),
        ("cdna3", ("denorm_mode_32 3", "denorm_mode_32 0"), "flushes",
         ("fp32", "v_exp_f32", "v_log_f32")),
    ],
)  # fmt: skip
def test_a_planted_change_is_seen_and_fails(kernel: str, change: Plant, field: str, value: object) -> None:
    assert change[0] in KERNELS[kernel]
    before, after = audit(KERNELS[kernel], kernel), audit(KERNELS[kernel].replace(*change, 1), kernel)
    assert getattr(after, field) == value
    assert any(line.startswith(f"target kernel: {field}: ") for line in differences([before], [after]))


END = "	.amdhsa_float_round_mode_32"


@pytest.mark.parametrize(
    ("kernel", "changes", "operand_cast", "output_cast"),
    [
        # Of two numbers in one register the nearest counts.
        ("cdna3", (("s_movk_i32 s3, 0x7fff", "s_mov_b32 s3, 0x7ffff"),
                   ("	v_bfe_u32 v54", "	s_movk_i32 s3, 0x7fff\n	v_bfe_u32 v54")),
         "v_add3_u32 0x7ffff + last bit", RNE),
        # A vector register that holds a variable is no number.
        ("cdna4", (("	v_pk_mul", "	v_lshlrev_b32_e32 v90, 2, v91\n	v_add3_u32 v92, v91, v93, v90\n	v_pk_mul"),
                   (END, "	v_mov_b32_e32 v90, 0x7fff\n" + END)), "v_cvt_pk_bf16_f32", "v_cvt_pk_bf16_f32"),
        # A number that was rounded, back in fp32 as where a plan rounds at every step, is not cut again.
        ("cdna4", ((END, "	v_and_b32_e32 v61, 0xffff0000, v52\n	v_lshrrev_b32_e32 v62, 16, v52\n" + END),),
         "v_cvt_pk_bf16_f32", "v_cvt_pk_bf16_f32"),
        ("cdna3", (("v_add3_u32 v54, v52, v54, s3", "v_add3_u32 v55, v52, v54, s3"),
                   ("v_lshrrev_b32_e32 v54, 16, v54", "v_lshrrev_b32_e32 v54, 16, v55"),
                   (END, "	v_and_b32_e32 v61, 0xffff0000, v55\n" + END)), RNE, RNE),
    ],
)  # fmt: skip
def test_where_a_number_comes_from(
    kernel: str, changes: tuple[Plant, ...], operand_cast: str, output_cast: str
) -> None:
    text = KERNELS[kernel]
    for change in changes:
        assert change[0] in text
        text = text.replace(*change, 1)
    report = audit(text, kernel)
    assert (report.operand_casts, report.output_casts) == ((operand_cast,), (output_cast,))


@pytest.mark.parametrize(
    "text",
    [
        "v_perm_b32 v0, v1, v2, s4",  # of what was loaded
        "v_lshrrev_b32_e32 v3, 16, v9",
        "v_and_b32_e32 v3, 0xffff0000, v9",  # a bf16 number made an fp32 one
        "v_xor_b32_e32 v3, v8, v9\nv_lshrrev_b32_e32 v3, 16, v3",  # a hash
        "v_cvt_f32_bf16 v1, v2",
        "v_cvt_f32_i32_e32 v1, v2",
    ],
)
def test_what_only_looks_like_a_cast(text: str) -> None:
    report = audit(f"global_load_dword v9, v8, s[0:1]\ns_mov_b32 s4, 0x7060302\n{text}\n{SETTINGS}", "cdna3")
    assert report.operand_casts == report.output_casts == ()


def test_assembly_that_does_not_say_its_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="float_denorm_mode_32"):
        audit("v_exp_f32_e32 v0, v1", "cdna3")
