// Owns what joins gate and up in a feed-forward, as a record and, for AVX-512, as vectors.
// It refuses to know where gate and up come from.
#pragma once
#include <cstdint>

#ifdef __AVX512F__
#include "vector_math.hpp"
#endif

namespace firstlight {

// SiLU(gate) up; when bent, SiTU: beta tanh(gate / beta) sigmoid(gate) up, and when also bends_up,
// linear_beta tanh(up / linear_beta) in place of up.
struct GatedActivation {
  bool bent = false, bends_up = false;
  float beta = 1.0f, linear_beta = 1.0f;
};

void activate(const float* gate, const float* up, float* out, std::int64_t count,
              const GatedActivation& activation, int threads);

#ifdef __AVX512F__
// tanh(x) within a few units in the last place for every x; NaN for NaN.
inline __m512 tanh_512(__m512 x) {
  // Near zero 1 - 2 / (exp(2x) + 1) cancels: tanh(x) = x + x z P(z), z = x^2 <= 0.4, P fitted here
  // by least squares at Chebyshev points, relative error below 6e-9.
  const __m512 z = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-0x1.714b6ep-8f);
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(0x1.511facp-6f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-0x1.b813dap-5f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(0x1.1105ecp-3f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-0x1.55552cp-2f));
  const __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(x, z), p, x);
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  const __m512 size = _mm512_abs_ps(x);
  const __m512 grown = _mm512_add_ps(exp_512(_mm512_mul_ps(size, two)), one);
  const __m512 far = _mm512_sub_ps(one, _mm512_div_ps(two, grown));
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 31));
  const __m512 signed_far = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(far), sign));
  const __mmask16 is_near = _mm512_cmp_ps_mask(z, _mm512_set1_ps(0.4f), _CMP_LE_OQ);
  return _mm512_mask_mov_ps(signed_far, is_near, near);
}

inline __m512 activate_512(__m512 gate, __m512 up, const GatedActivation& activation) {
  if (!activation.bent) return _mm512_mul_ps(silu_512(gate), up);
  const __m512 one = _mm512_set1_ps(1.0f), beta = _mm512_set1_ps(activation.beta);
  const __m512 tanh = _mm512_mul_ps(beta, tanh_512(_mm512_div_ps(gate, beta)));
  const __m512 negative = _mm512_sub_ps(_mm512_setzero_ps(), gate);
  const __m512 bent = _mm512_div_ps(tanh, _mm512_add_ps(one, exp_512(negative)));
  if (activation.bends_up) {
    const __m512 linear_beta = _mm512_set1_ps(activation.linear_beta);
    up = _mm512_mul_ps(linear_beta, tanh_512(_mm512_div_ps(up, linear_beta)));
  }
  return _mm512_mul_ps(bent, up);
}
#endif

}  // namespace firstlight
