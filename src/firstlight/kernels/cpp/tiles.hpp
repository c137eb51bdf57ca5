// Owns the exact three-way bf16 split of fp32 and the AMX tile instructions used on it.
// It refuses to know matrices beyond one 16 x 32 tile.
//
// x = x1 + x2 + x3, each a bf16 number, holds exactly for finite x down to the subnormals of the
// parts. A product keeps x1y1, x1y2, x2y1, x2y2, x1y3, x3y1: what is dropped is below 2^-23 |xy|.
// Infinity and NaN become NaN: the remainder inf - inf is NaN. Magnitudes above 3.39e38 round to
// infinity in y1 and give NaN as well. AMX takes subnormals as zero.
//
// A tile row holds 16 dwords; dword p pairs channels p (low half) and p + 16 (high half) of 32.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

namespace firstlight {

constexpr int kTileBytes = 1024;
constexpr int kTileRows = 16;
constexpr int kStep = 32;               // channels a tile covers
constexpr int kParts = 3;
constexpr int kStepBytes = kParts * kTileBytes;

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t columns_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Holds the tile registers of the calling thread while it lives.
struct TileSession {
  TileSession() {
    static const TileConfig config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileSession() { asm volatile("tilerelease" ::: "memory"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

template <int kTile>
inline void tile_load(const void* source) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(std::int64_t{64}), "i"(kTile)
               : "memory");
}

template <int kTile>
inline void tile_store(void* target) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(std::int64_t{64}), "i"(kTile)
               : "memory");
}

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kSum, int kLeft, int kRight>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

inline __m512i high_bits() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }

// Joins the high halves of two vectors: `low` into the low halves, `high` into the high halves.
inline __m512i join_halves(__m512i low, __m512i high) {
  // (mask & high) | (~mask & shifted)
  return _mm512_ternarylogic_epi32(high_bits(), high, _mm512_srli_epi32(low, 16), 0xca);
}

// One row of the left operand: splits by truncation.
inline void split_row(__m512 low, __m512 high, std::uint8_t* row) {
  const __m512i mask = high_bits();
  const __m512i low_bits = _mm512_castps_si512(low), high_half = _mm512_castps_si512(high);
  _mm512_store_si512(row, join_halves(low_bits, high_half));
  const __m512 low_rest = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(low_bits, mask)));
  const __m512 high_rest =
      _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(high_half, mask)));
  const __m512i low_2 = _mm512_castps_si512(low_rest), high_2 = _mm512_castps_si512(high_rest);
  _mm512_store_si512(row + kTileBytes, join_halves(low_2, high_2));
  const __m512 low_3 = _mm512_sub_ps(low_rest, _mm512_castsi512_ps(_mm512_and_si512(low_2, mask)));
  const __m512 high_3 =
      _mm512_sub_ps(high_rest, _mm512_castsi512_ps(_mm512_and_si512(high_2, mask)));
  _mm512_store_si512(row + 2 * kTileBytes,
                     join_halves(_mm512_castps_si512(low_3), _mm512_castps_si512(high_3)));
}

// Rounds to bf16 in place (half away from zero), as a float whose low half is zero.
inline __m512 round_part(__m512 x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, high_bits()));
}

// One row of the right operand: splits by rounding, so that dropped terms have no common sign.
inline void split_row_rounded(__m512 low, __m512 high, std::uint8_t* row) {
  for (int part = 0; part < 2; ++part) {
    const __m512 low_part = round_part(low), high_part = round_part(high);
    _mm512_store_si512(row + part * kTileBytes, join_halves(_mm512_castps_si512(low_part),
                                                            _mm512_castps_si512(high_part)));
    low = _mm512_sub_ps(low, low_part);
    high = _mm512_sub_ps(high, high_part);
  }
  _mm512_store_si512(row + 2 * kTileBytes,
                     join_halves(_mm512_castps_si512(low), _mm512_castps_si512(high)));
}

// Transposes 16 vectors of 16 floats in place.
inline void transpose_16(__m512 (&rows)[16]) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    rows[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    rows[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    rows[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    rows[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = rows[i], b = rows[4 + i], c = rows[8 + i], d = rows[12 + i];
    t[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(a, b, 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(c, d, 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    rows[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    rows[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

inline __mmask16 lanes(std::int64_t valid) {
  return valid >= 16 ? 0xffff : valid <= 0 ? 0 : static_cast<__mmask16>((1u << valid) - 1);
}

// Splits and transposes up to 16 rows by 32 channels into three tiles of a right operand;
// missing rows and channels are zero.
inline void pack_step(const float* x, std::int64_t stride, std::int64_t rows, std::int64_t channels,
               std::uint8_t* target) {
  __m512 low[16], high[16];
  const __mmask16 low_lanes = lanes(channels), high_lanes = lanes(channels - 16);
  for (int row = 0; row < 16; ++row) {
    const bool exists = row < rows;
    const float* source = exists ? x + row * stride : x;
    low[row] = _mm512_maskz_loadu_ps(exists ? low_lanes : 0, source);
    high[row] = _mm512_maskz_loadu_ps(exists ? high_lanes : 0, source + 16);
  }
  transpose_16(low);
  transpose_16(high);
  for (int pair = 0; pair < 16; ++pair) split_row_rounded(low[pair], high[pair], target + pair * 64);
}

template <int kTiles, class Function>
inline void each_tile(Function&& function) {
  function(std::integral_constant<int, 0>{});
  if constexpr (kTiles > 1) function(std::integral_constant<int, 1>{});
  if constexpr (kTiles > 2) function(std::integral_constant<int, 2>{});
  if constexpr (kTiles > 3) function(std::integral_constant<int, 3>{});
}

// One step of up to 4 left tiles (kApart bytes apart) with one right tile: sums in tiles 0..3.
// With kOnePart the second and third parts of the left tiles are zero and not read.
template <int kTiles, bool kOnePart = false, int kApart = kStepBytes>
inline void step_column(const std::uint8_t* left, const std::uint8_t* right) {
  tile_load<5>(right + 2 * kTileBytes);
  tile_load<6>(right + kTileBytes);
  tile_load<7>(right);
  each_tile<kTiles>([&](auto i) {
    tile_load<4>(left + i * kApart);
    tile_multiply<i, 4, 5>();
    tile_multiply<i, 4, 6>();
    tile_multiply<i, 4, 7>();
  });
  if constexpr (kOnePart) return;
  each_tile<kTiles>([&](auto i) {
    tile_load<4>(left + i * kApart + 2 * kTileBytes);
    tile_multiply<i, 4, 7>();
  });
  each_tile<kTiles>([&](auto i) {
    tile_load<4>(left + i * kApart + kTileBytes);
    tile_multiply<i, 4, 7>();
    tile_multiply<i, 4, 6>();
  });
}

template <int kTiles>
inline void load_sums(float* sums, bool first) {
  each_tile<kTiles>([&](auto i) {
    if (first) {
      tile_zero<i>();
    } else {
      tile_load<i>(sums + i * 256);
    }
  });
}

template <int kTiles>
inline void store_sums(float* sums) {
  each_tile<kTiles>([&](auto i) { tile_store<i>(sums + i * 256); });
}

}  // namespace firstlight
