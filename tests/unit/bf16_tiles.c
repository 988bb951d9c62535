/* Tiles of raw bf16 patterns through BFMMLA and BFDOT, for tests/unit/test_bf16_instructions.py.
   In: a (2, 8) and b transposed (2, 8) of bf16, c (2, 2) of fp32. Out: c + a b, by BFMMLA, then by BFDOT. */
#include <arm_neon.h>
#include <stdio.h>
#include <string.h>
struct in { uint16_t a[2][8], b[2][8]; float c[2][2]; } t;
int main(void) {
  while (fread(&t, sizeof t, 1, stdin) == 1) {
    float out[8];
    float32x4_t d = vld1q_f32(&t.c[0][0]);
    for (int k = 0; k < 8; k += 4) {
      uint16_t x[8], y[8];
      memcpy(x, &t.a[0][k], 8); memcpy(x + 4, &t.a[1][k], 8);
      memcpy(y, &t.b[0][k], 8); memcpy(y + 4, &t.b[1][k], 8);
      d = vbfmmlaq_f32(d, vreinterpretq_bf16_u16(vld1q_u16(x)), vreinterpretq_bf16_u16(vld1q_u16(y)));
    }
    vst1q_f32(out, d);
    /* BFDOT adds two products a lane: lane l = 2 i + j is output (i, j). */
    float32x4_t e = vld1q_f32(&t.c[0][0]);
    for (int k = 0; k < 8; k += 2) {
      uint16_t x[8], y[8];
      for (int l = 0; l < 4; l++) { memcpy(x + 2 * l, &t.a[l / 2][k], 4); memcpy(y + 2 * l, &t.b[l % 2][k], 4); }
      e = vbfdotq_f32(e, vreinterpretq_bf16_u16(vld1q_u16(x)), vreinterpretq_bf16_u16(vld1q_u16(y)));
    }
    vst1q_f32(out + 4, e);
    fwrite(out, sizeof out, 1, stdout);
  }
}
