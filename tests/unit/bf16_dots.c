/* Rows of raw bf16 patterns through VDPBF16PS, for tests/unit/test_bf16_instructions.py.
   In: a (8) and b (8) of bf16, c of fp32. Out: c + a b, by four instructions of two products. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
struct in { uint32_t a[4], b[4], c; } t;
int main(void) {
  while (fread(&t, sizeof t, 1, stdin) == 1) {
    __m128 d = _mm_castsi128_ps(_mm_set1_epi32(t.c));
    for (int k = 0; k < 4; k++)
      d = _mm_dpbf16_ps(d, (__m128bh)_mm_set1_epi32(t.a[k]), (__m128bh)_mm_set1_epi32(t.b[k]));
    float out = _mm_cvtss_f32(d);
    fwrite(&out, sizeof out, 1, stdout);
  }
}
