// Owns how the rows of a weight lie in memory, packed or not, and how 32 channels become fp32.
// It refuses to know what is multiplied with them.
//
// Every format decodes to the fp32 values it was packed from, bit for bit. Rows stand back to back:
//   affine4   fp16 d[blocks], fp16 m[blocks], then 16 bytes a block: the low half of byte i holds
//             channel i of 32, the high half channel 16 + i; the value is d q + m, rounded once
//   scaled8   fp16 d[blocks], then 32 signed bytes a block; the value is d q, exact
//   bfloat16  the upper halves of the values
//   float32   the values
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace firstlight {

enum class WeightFormat { float32, bfloat16, scaled8, affine4 };

constexpr std::int64_t kBlock = 32;           // channels that share a scale
constexpr std::int64_t kBlocksAtOnce = 64;    // whose scales are widened together

inline std::int64_t row_bytes_of(WeightFormat format, std::int64_t columns) {
  switch (format) {
    case WeightFormat::affine4: return columns / kBlock * 20;
    case WeightFormat::scaled8: return columns / kBlock * 34;
    case WeightFormat::bfloat16: return columns * 2;
    default: return columns * 4;
  }
}

// Rows of a weight; formats other than float32 have whole blocks.
struct Weight {
  const std::uint8_t* data = nullptr;
  WeightFormat format = WeightFormat::float32;
  std::int64_t row_bytes = 0;

  Weight() = default;
  Weight(const void* bytes, WeightFormat kind, std::int64_t columns)
      : data(static_cast<const std::uint8_t*>(bytes)),
        format(kind),
        row_bytes(row_bytes_of(kind, columns)) {}
  const std::uint8_t* row(std::int64_t index) const { return data + index * row_bytes; }
};

// fp16 numbers to fp32.
inline void widen_halves(const std::uint8_t* source, std::int64_t count, float* target) {
  for (std::int64_t i = 0; i < count; i += 16) {
    const std::int64_t left = count - i;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, source + 2 * i);
    _mm512_mask_storeu_ps(target + i, mask, _mm512_cvtph_ps(halves));
  }
}

inline __m512 counted() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline __m512 widen_bfloat16(const std::uint8_t* source) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Reads one packed row, at most kBlocksAtOnce blocks after each start().
template <WeightFormat kFormat>
struct RowReader;

template <>
struct RowReader<WeightFormat::affine4> {
  static constexpr std::int64_t kQuantBytes = 16;
  const std::uint8_t *row, *quants;
  std::int64_t blocks;
  alignas(64) float scales[kBlocksAtOnce], offsets[kBlocksAtOnce];

  void open(const std::uint8_t* at, std::int64_t columns) {
    row = at;
    blocks = columns / kBlock;
  }
  void start(std::int64_t first, std::int64_t count) {
    widen_halves(row + 2 * first, count, scales);
    widen_halves(row + 2 * (blocks + first), count, offsets);
    quants = row + 4 * blocks + kQuantBytes * first;
  }
  void read(std::int64_t block, __m512& low, __m512& high) const {
    // The product is exact, so the multiply-add rounds as an addition would.
    const __m512 values = _mm512_fmadd_ps(counted(), _mm512_set1_ps(scales[block]),
                                          _mm512_set1_ps(offsets[block]));
    const __m512i pairs = _mm512_cvtepu8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(quants + kQuantBytes * block)));
    // A permutation looks at the lowest four bits only.
    low = _mm512_permutexvar_ps(pairs, values);
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values);
  }
};

template <>
struct RowReader<WeightFormat::scaled8> {
  static constexpr std::int64_t kQuantBytes = 32;
  const std::uint8_t *row, *quants;
  std::int64_t blocks;
  alignas(64) float scales[kBlocksAtOnce];

  void open(const std::uint8_t* at, std::int64_t columns) {
    row = at;
    blocks = columns / kBlock;
  }
  void start(std::int64_t first, std::int64_t count) {
    widen_halves(row + 2 * first, count, scales);
    quants = row + 2 * blocks + kQuantBytes * first;
  }
  void read(std::int64_t block, __m512& low, __m512& high) const {
    const __m512 scale = _mm512_set1_ps(scales[block]);
    const auto* at = reinterpret_cast<const __m128i*>(quants + kQuantBytes * block);
    low = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at))), scale);
    high = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1))), scale);
  }
};

template <>
struct RowReader<WeightFormat::bfloat16> {
  static constexpr std::int64_t kQuantBytes = 64;
  const std::uint8_t *row, *quants;

  void open(const std::uint8_t* at, std::int64_t) { row = at; }
  void start(std::int64_t first, std::int64_t) { quants = row + kQuantBytes * first; }
  void read(std::int64_t block, __m512& low, __m512& high) const {
    low = widen_bfloat16(quants + kQuantBytes * block);
    high = widen_bfloat16(quants + kQuantBytes * block + 32);
  }
};

// Calls function(block, low, high) for blocks [first, first + count) of a packed row.
template <WeightFormat kFormat, class Function>
inline void each_block(const std::uint8_t* row, std::int64_t columns, std::int64_t first,
                       std::int64_t count, Function&& function) {
  RowReader<kFormat> reader;
  reader.open(row, columns);
  for (std::int64_t begin = 0; begin < count; begin += kBlocksAtOnce) {
    const std::int64_t some = std::min(kBlocksAtOnce, count - begin);
    reader.start(first + begin, some);
    for (std::int64_t i = 0; i < some; ++i) {
      __m512 low, high;
      reader.read(i, low, high);
      function(begin + i, low, high);
    }
  }
}

}  // namespace firstlight
