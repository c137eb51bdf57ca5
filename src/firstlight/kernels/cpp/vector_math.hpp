// Owns AVX-512 forms of exp and silu at fp32 accuracy; knows nothing of tensors.
#pragma once
#include <immintrin.h>

namespace firstlight {

// exp(x) within 1 unit in the last place or so; infinity above 88.72, NaN for NaN, and 0 below -87:
// subnormal results would each cost a microcode assist of over 100 cycles.
inline __m512 exp_512(__m512 x) {
  // min and max return their second operand when one is NaN, so NaN passes through.
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  const __m512 clipped = _mm512_max_ps(_mm512_set1_ps(-87.0f),
                                       _mm512_min_ps(_mm512_set1_ps(89.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clipped, log2e), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clipped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(kept, _mm512_scalef_ps(p, n));
}

inline __m512 silu_512(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 denominator = _mm512_add_ps(one, exp_512(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  return _mm512_div_ps(x, denominator);
}

}  // namespace firstlight
