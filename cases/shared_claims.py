"""Words and claims that the scripted inputs of more than one module share."""

from tiebreak.cases.claims import BIASED_TOWARD, UNBIASED, claim, shrinks

PAPER = "arXiv 2510.04212"
OWN = "this suite"

FUSED = "fused fused_contracted"

# fair = dithered + fused_stochastic; each of its halves is claimed only where it is sound on its own.
FAIR = claim(UNBIASED, f"{OWN}: the cure", rules="dithered", plans="fused_stochastic", formats="bf16 fp16")
# bf16(e^-1) = 0.3672 is 1.9e-3 too small in every row, 0.3 ulp of O where l sums P-bar before its cast.
OFFSET_HARMS = claim(
    BIASED_TOWARD,
    f"{PAPER} v1, appendix C: fixed offset; {OWN}: e^-1 rounds down",
    rules="fixed_offset",
    plans="paper",
)
# Where r_m is drawn from [1, 6); docs/science.md derives it.
V1_IN_FP16 = claim(
    shrinks(0.18, 0.59),
    f"{OWN}: beta = 7 leaves exp(-6 r_m), 0 in fp16 from r_m = 2.9 on",
    rules="stabilized_v1",
    plans="paper fused",
    formats="fp16",
    tiled=False,
)
