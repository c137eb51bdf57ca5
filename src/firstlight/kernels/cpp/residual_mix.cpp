// Owns attention over earlier residual sums with AVX-512, token by token.
// It refuses to know Python, torch and layers.
#include "residual_mix.hpp"

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "threads.hpp"

namespace firstlight {
namespace {

inline __mmask16 lanes_left(std::int64_t left) {
  return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

float score_of(const ResidualMixCall& call, const float* row) {
  __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512 dots[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (std::int64_t i = 0; i < call.width; i += 16) {
    const __mmask16 mask = lanes_left(call.width - i);
    const __m512 value = _mm512_maskz_loadu_ps(mask, row + i);
    const int odd = i >> 4 & 1;
    squares[odd] = _mm512_fmadd_ps(value, value, squares[odd]);
    dots[odd] = _mm512_fmadd_ps(value, _mm512_maskz_loadu_ps(mask, call.query + i), dots[odd]);
  }
  const float mean = _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) /
                     static_cast<float>(call.width);
  return _mm512_reduce_add_ps(_mm512_add_ps(dots[0], dots[1])) / std::sqrt(mean + call.epsilon);
}

void mix_token(const ResidualMixCall& call, std::int64_t token) {
  const std::int64_t count = call.rows + 1;
  const float* rows[kMostMixedRows];
  float shares[kMostMixedRows];
  for (std::int64_t i = 0; i < count; ++i) {
    rows[i] = i < call.rows ? call.bank + token * call.token_stride + i * call.row_stride
                            : call.current + token * call.width;
    shares[i] = score_of(call, rows[i]);
  }
  const float top = *std::max_element(shares, shares + count);
  float total = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) total += shares[i] = std::exp(shares[i] - top);
  for (std::int64_t i = 0; i < count; ++i) shares[i] /= total;
  float* out = call.out + token * call.width;
  for (std::int64_t at = 0; at < call.width; at += 16) {
    const __mmask16 mask = lanes_left(call.width - at);
    __m512 sum = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < count; ++i) {
      const __m512 value = _mm512_maskz_loadu_ps(mask, rows[i] + at);
      sum = _mm512_fmadd_ps(_mm512_set1_ps(shares[i]), value, sum);
    }
    _mm512_mask_storeu_ps(out + at, mask, sum);
  }
}

}  // namespace

void residual_mix(const ResidualMixCall& call) {
  const std::int64_t grain = (32 << 10) / (call.width * (call.rows + 1)) + 1;
  each_piece(call.threads, call.tokens, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) mix_token(call, token);
  });
}

}  // namespace firstlight
