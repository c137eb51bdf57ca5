// Owns how a row of floats becomes INT8 with fp16 scales, and Hadamard's matrix before it.
// It refuses to know where rows lie and what they mean.
#include "quantise.hpp"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tiles.hpp"

namespace firstlight {
namespace {

constexpr float kMost = 127.0f;

float greatest_magnitude(const float* row, std::int64_t channels) {
  __m512 most = _mm512_setzero_ps();
  bool is_number = true;
  for (std::int64_t i = 0; i < channels; i += 16) {
    const __m512 x = _mm512_maskz_loadu_ps(lanes(channels - i), row + i);
    is_number &= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) == 0;
    most = _mm512_max_ps(most, _mm512_abs_ps(x));
  }
  return is_number ? _mm512_reduce_max_ps(most) : std::numeric_limits<float>::quiet_NaN();
}

void round_bytes(const float* row, std::int64_t channels, float step, std::int8_t* bytes) {
  const __m512 most = _mm512_set1_ps(kMost), least = _mm512_set1_ps(-kMost);
  for (std::int64_t i = 0; i < channels; i += 16) {
    const __mmask16 mask = lanes(channels - i);
    const __m512 ratio =
        _mm512_div_ps(_mm512_maskz_loadu_ps(mask, row + i), _mm512_set1_ps(step));
    const __mmask16 number = _mm512_cmp_ps_mask(ratio, ratio, _CMP_ORD_Q);
    const __m512 whole = _mm512_roundscale_ps(_mm512_maskz_mov_ps(number, ratio),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i integers = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(whole, least), most));
    _mm_mask_storeu_epi8(bytes + i, mask, _mm512_cvtepi32_epi8(integers));
  }
}

}  // namespace

void spread_row(float* row, std::int64_t channels) {
  const std::int64_t size = channels & -channels;
  for (std::int64_t half = 1; half < size; half *= 2) {
    for (std::int64_t first = 0; first < channels; first += 2 * half) {
      for (std::int64_t i = first; i < first + half; ++i) {
        const float low = row[i], high = row[i + half];
        row[i] = low + high;
        row[i + half] = low - high;
      }
    }
  }
  const float factor = static_cast<float>(std::pow(static_cast<double>(size), -0.5));
  for (std::int64_t i = 0; i < channels; ++i) row[i] *= factor;
}

void quantise_row(const float* row, std::int64_t channels, std::int64_t group, std::int8_t* bytes,
                  std::uint16_t* scales) {
  for (std::int64_t first = 0; first < channels; first += group) {
    const std::int64_t count = std::min(group, channels - first);
    const std::uint16_t half =
        _cvtss_sh(greatest_magnitude(row + first, count) / kMost, _MM_FROUND_TO_NEAREST_INT);
    const float step = _cvtsh_ss(half);
    scales[first / group] = half;
    if (step == 0.0f) {
      std::fill(bytes + first, bytes + first + count, std::int8_t{0});
    } else {
      round_bytes(row + first, count, step, bytes + first);
    }
  }
}

}  // namespace firstlight
