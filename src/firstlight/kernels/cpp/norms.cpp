// Owns norms and the greedy choice with AVX-512, row by row: rows don't depend on each other.
// It refuses to know Python and torch.
#include "norms.hpp"

#include <immintrin.h>

#include <cmath>

#include "threads.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kNumbersAtOnce = 32 << 10;

__mmask16 lanes_left(std::int64_t left) {
  return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

template <class Function>
void each_row(std::int64_t rows, std::int64_t width, int threads, Function&& function) {
  const std::int64_t grain = kNumbersAtOnce / width + 1;
  each_piece(threads, rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) function(row);
  });
}

void norm_row(const NormCall& call, std::int64_t row) {
  const float* x = call.x + row * call.width;
  float* normed = call.normed + row * call.width;
  __m512 squares = _mm512_setzero_ps();
  if (call.residual) {
    const float* residual = call.residual + row * call.width;
    float* sum = call.sum + row * call.width;
    for (std::int64_t i = 0; i < call.width; i += 16) {
      const __mmask16 mask = lanes_left(call.width - i);
      const __m512 value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, x + i),
                                         _mm512_maskz_loadu_ps(mask, residual + i));
      _mm512_mask_storeu_ps(sum + i, mask, value);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    x = sum;
  } else {
    for (std::int64_t i = 0; i < call.width; i += 16) {
      const __m512 value = _mm512_maskz_loadu_ps(lanes_left(call.width - i), x + i);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(call.width);
  const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(mean + call.epsilon));
  for (std::int64_t i = 0; i < call.width; i += 16) {
    const __mmask16 mask = lanes_left(call.width - i);
    const __m512 unit = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), inverse);
    const __m512 weight = _mm512_maskz_loadu_ps(mask, call.weight + i);
    _mm512_mask_storeu_ps(normed + i, mask, _mm512_mul_ps(unit, weight));
  }
}

// Index of the first greatest number, or of the first NaN.
std::int64_t greatest_of(const float* row, std::int64_t width) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  __m512 top = lowest;
  __mmask16 strange = 0;
  for (std::int64_t i = 0; i < width; i += 16) {
    const __mmask16 mask = lanes_left(width - i);
    const __m512 value = _mm512_mask_loadu_ps(lowest, mask, row + i);
    strange |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    top = _mm512_max_ps(top, value);
  }
  const __m512 wanted = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (std::int64_t i = 0; i < width; i += 16) {
    const __mmask16 mask = lanes_left(width - i);
    const __m512 value = _mm512_maskz_loadu_ps(mask, row + i);
    const __mmask16 hits = strange ? _mm512_mask_cmp_ps_mask(mask, value, value, _CMP_UNORD_Q)
                                   : _mm512_mask_cmp_ps_mask(mask, value, wanted, _CMP_EQ_OQ);
    if (hits) return i + __builtin_ctz(hits);
  }
  return 0;
}

void greedy_row(const GreedyCall& call, std::int64_t index) {
  const float* row = call.logits + index * call.width;
  const std::int64_t best = greatest_of(row, call.width);
  const __m512 top = _mm512_set1_ps(row[best]);
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (std::int64_t i = 0; i < call.width; i += 16) {
    const __mmask16 mask = lanes_left(call.width - i);
    const __m512 value = exp_512(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, row + i), top));
    __m512& sum = sums[i >> 4 & 1];
    sum = _mm512_mask_add_ps(sum, mask, sum, value);
  }
  call.ids[index] = best;
  call.log_probabilities[index] =
      -std::log(_mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])));
}

}  // namespace

void rms_norm(const NormCall& call) {
  each_row(call.rows, call.width, call.threads, [&](std::int64_t row) { norm_row(call, row); });
}

void greedy(const GreedyCall& call) {
  each_row(call.rows, call.width, call.threads, [&](std::int64_t row) { greedy_row(call, row); });
}

}  // namespace firstlight
