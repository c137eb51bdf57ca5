// Owns the search for the numbers a block of fp32 values was made from, and its inverse.
// It refuses to know Python and torch. Every block is decoded again and compared bit for bit.
#include "packing.hpp"

#include <atomic>
#include <cmath>

#include "threads.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kNumbersAtOnce = 64 << 10;

struct Block {
  __m512 low, high;
};

bool same_bits(__m512 left, __m512 right) {
  return _mm512_cmpneq_epi32_mask(_mm512_castps_si512(left), _mm512_castps_si512(right)) == 0;
}

bool same_bits(const Block& left, __m512 low, __m512 high) {
  return same_bits(left.low, low) && same_bits(left.high, high);
}

std::uint16_t to_half(float value) {
  return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

void store_half(std::uint16_t value, std::uint8_t* target) { std::memcpy(target, &value, 2); }

// Nearest integers of (x - offset) / scale within [least, most]; never a negative zero, which no
// integer could keep.
__m512 quotients(__m512 x, float scale, float offset, float least, float most) {
  if (scale == 0.0f) return _mm512_setzero_ps();
  const __m512 shifted = _mm512_sub_ps(x, _mm512_set1_ps(offset));
  const __m512 whole = _mm512_roundscale_ps(_mm512_div_ps(shifted, _mm512_set1_ps(scale)), 8);
  const __m512 bounded =
      _mm512_min_ps(_mm512_max_ps(whole, _mm512_set1_ps(least)), _mm512_set1_ps(most));
  return _mm512_add_ps(bounded, _mm512_setzero_ps());
}

// Where the parts of a row's block go.
struct Target {
  std::uint8_t *scale, *offset, *quants;
};

bool fit_affine(const Block& block, float step, float base, const Target& target) {
  const std::uint16_t scale_half = to_half(step), base_half = to_half(base);
  const float scale = _cvtsh_ss(scale_half), offset = _cvtsh_ss(base_half);
  if (!std::isfinite(scale) || !std::isfinite(offset)) return false;
  const __m512 low = quotients(block.low, scale, offset, 0, 15);
  const __m512 high = quotients(block.high, scale, offset, 0, 15);
  const __m512 d = _mm512_set1_ps(scale), m = _mm512_set1_ps(offset);
  if (!same_bits(block, _mm512_fmadd_ps(low, d, m), _mm512_fmadd_ps(high, d, m))) return false;
  const __m512i both = _mm512_or_si512(_mm512_cvtps_epi32(low),
                                       _mm512_slli_epi32(_mm512_cvtps_epi32(high), 4));
  store_half(scale_half, target.scale);
  store_half(base_half, target.offset);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target.quants), _mm512_cvtepi32_epi8(both));
  return true;
}

// From least to greatest in 15 steps, or from the greatest magnitude in steps of an eighth.
bool pack_affine(const Block& block, const Target& target) {
  const float least = _mm512_reduce_min_ps(_mm512_min_ps(block.low, block.high));
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(block.low, block.high));
  if (fit_affine(block, (most - least) / 15.0f, least, target)) return true;
  const float base = std::fabs(most) > std::fabs(least) ? most : least;
  return fit_affine(block, base / -8.0f, base, target);
}

bool fit_scaled(const Block& block, float step, const Target& target) {
  const std::uint16_t half = to_half(step);
  const float scale = _cvtsh_ss(half);
  if (!std::isfinite(scale)) return false;
  const __m512 low = quotients(block.low, scale, 0, -128, 127);
  const __m512 high = quotients(block.high, scale, 0, -128, 127);
  const __m512 d = _mm512_set1_ps(scale);
  if (!same_bits(block, _mm512_mul_ps(low, d), _mm512_mul_ps(high, d))) return false;
  store_half(half, target.scale);
  auto* quants = reinterpret_cast<__m128i*>(target.quants);
  _mm_storeu_si128(quants, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(low)));
  _mm_storeu_si128(quants + 1, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(high)));
  return true;
}

// The greatest magnitude is 127 steps, or -8 or -128 of them whatever the sign of the step.
bool pack_scaled(const Block& block, const Target& target) {
  const __m512 sizes = _mm512_max_ps(_mm512_abs_ps(block.low), _mm512_abs_ps(block.high));
  const float size = _mm512_reduce_max_ps(sizes);
  if (fit_scaled(block, size / 127.0f, target)) return true;
  for (const float steps : {8.0f, 128.0f}) {
    for (const float sign : {1.0f, -1.0f}) {
      if (fit_scaled(block, sign * size / steps, target)) return true;
    }
  }
  return false;
}

bool pack_bfloat16(const Block& block, const Target& target) {
  const __m512i low = _mm512_castps_si512(block.low), high = _mm512_castps_si512(block.high);
  if (_mm512_test_epi32_mask(_mm512_or_si512(low, high), _mm512_set1_epi32(0xffff))) return false;
  auto* halves = reinterpret_cast<__m256i*>(target.quants);
  _mm256_storeu_si256(halves, _mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16)));
  _mm256_storeu_si256(halves + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)));
  return true;
}

bool pack_row(const float* source, std::int64_t columns, WeightFormat format, std::uint8_t* row) {
  const std::int64_t blocks = columns / kBlock;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const Block block{_mm512_loadu_ps(source + i * kBlock),
                      _mm512_loadu_ps(source + i * kBlock + 16)};
    std::uint8_t* scale = row + 2 * i;
    bool fits = false;
    switch (format) {
      case WeightFormat::affine4:
        fits = pack_affine(block, {scale, scale + 2 * blocks, row + 4 * blocks + 16 * i});
        break;
      case WeightFormat::scaled8:
        fits = pack_scaled(block, {scale, nullptr, row + 2 * blocks + kBlock * i});
        break;
      case WeightFormat::bfloat16:
        fits = pack_bfloat16(block, {nullptr, nullptr, row + 2 * kBlock * i});
        break;
      default: break;
    }
    if (!fits) return false;
  }
  return true;
}

template <WeightFormat kFormat>
void decode_row(const std::uint8_t* row, std::int64_t columns, float* out) {
  each_block<kFormat>(row, columns, 0, columns / kBlock,
                      [&](std::int64_t block, __m512 low, __m512 high) {
                        _mm512_storeu_ps(out + block * kBlock, low);
                        _mm512_storeu_ps(out + block * kBlock + 16, high);
                      });
}

}  // namespace

bool pack_weight(const float* source, std::int64_t rows, std::int64_t columns, WeightFormat format,
                 std::uint8_t* target, int threads) {
  const std::int64_t row_bytes = row_bytes_of(format, columns);
  std::atomic<bool> fits{true};
  each_piece(threads, rows, kNumbersAtOnce / columns + 1,
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t row = begin; row < end && fits.load(); ++row) {
                 if (!pack_row(source + row * columns, columns, format, target + row * row_bytes)) {
                   fits.store(false);
                 }
               }
             });
  return fits.load();
}

void decode_rows(const Weight& weight, std::int64_t columns, const std::int64_t* ids,
                 std::int64_t count, float* out, int threads) {
  each_piece(threads, count, kNumbersAtOnce / columns + 1,
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t i = begin; i < end; ++i) {
                 const std::uint8_t* row = weight.row(ids[i]);
                 float* target = out + i * columns;
                 switch (weight.format) {
                   case WeightFormat::affine4:
                     decode_row<WeightFormat::affine4>(row, columns, target);
                     break;
                   case WeightFormat::scaled8:
                     decode_row<WeightFormat::scaled8>(row, columns, target);
                     break;
                   case WeightFormat::bfloat16:
                     decode_row<WeightFormat::bfloat16>(row, columns, target);
                     break;
                   default: std::memcpy(target, row, static_cast<std::size_t>(columns) * 4);
                 }
               }
             });
}

}  // namespace firstlight
