// Owns MXFP4 experts for many tokens on AMX tiles: codes become bf16, exactly, tile by tile.
// It refuses to know Python, torch and which tokens chose an expert.
//
// A code times its scale is a bf16 number, so the weight is one part; the other operand, 16 tokens,
// has the three parts of tiles.hpp. Dword p of a tile row pairs channels 2 p and 2 p + 1, as the
// codes lie in memory. Blocks of steps are summed apart, as in linear_amx.cpp.
#include <algorithm>

#include "experts.hpp"
#include "threads.hpp"
#include "tiles.hpp"

namespace firstlight {
namespace {

constexpr int kStripTiles = 4;                   // of 16 rows
constexpr std::int64_t kBlockSteps = 28;         // summed in the tiles
constexpr std::int64_t kScalesAtOnce = 16;
// The 64 bytes put the steps of a row into different sets of the first-level cache.
constexpr std::int64_t kStripStepBytes = kStripTiles * kTileBytes + 64;

std::int64_t tiles_of(std::int64_t count) { return (count + 15) / 16; }

std::int64_t prepared_bytes(std::int64_t count, std::int64_t width) {
  return tiles_of(count) * (width / kStep) * kStepBytes;
}

// 16 tokens by 32 channels, split and transposed; tokens that don't exist are zero.
void prepare_step(const ExpertsCall& call, const ExpertJob& job, std::int64_t tile,
                  std::int64_t step, std::uint8_t* target) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  __m512 low[16], high[16];
  for (int i = 0; i < 16; ++i) {
    const bool exists = tile * 16 + i < job.count;
    const std::int64_t token = exists ? job.tokens[tile * 16 + i] : 0;
    const float* source = call.x + token * call.inputs() + step * kStep;
    const __mmask16 mask = exists ? 0xffff : 0;
    const __m512 a = _mm512_maskz_loadu_ps(mask, source);
    const __m512 b = _mm512_maskz_loadu_ps(mask, source + 16);
    low[i] = _mm512_permutex2var_ps(a, even, b);
    high[i] = _mm512_permutex2var_ps(a, odd, b);
  }
  transpose_16(low);
  transpose_16(high);
  for (int i = 0; i < 16; ++i) split_row_rounded(low[i], high[i], target + i * 64);
}

void prepare(const ExpertsCall& call, const ExpertJob& job) {
  const std::int64_t steps = call.inputs() / kStep;
  for (std::int64_t i = 0; i < tiles_of(job.count) * steps; ++i) {
    prepare_step(call, job, i / steps, i % steps, job.x + i * kStepBytes);
  }
}

// bf16 of the 16 codes, twice.
inline __m512i code_words() {
  alignas(64) static constexpr std::uint16_t words[32] = {
      0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
      0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  return _mm512_load_si512(words);
}

// Exponents of up to 16 groups, as what they add to the bf16 exponent, in both halves of a dword.
// Returns whether every product is a normal number.
inline bool exponents_of(const std::uint8_t* source, std::int64_t count, std::int32_t* added) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, source));
  const __m512i moved =
      _mm512_slli_epi32(_mm512_sub_epi32(exponents, _mm512_set1_epi32(127)), 7);
  const __m512i words = _mm512_and_si512(moved, _mm512_set1_epi32(0xffff));
  _mm512_store_si512(added, _mm512_or_si512(words, _mm512_slli_epi32(moved, 16)));
  const __m512i above_two = _mm512_sub_epi32(exponents, _mm512_set1_epi32(2));
  return _mm512_mask_cmp_epu32_mask(mask, above_two, _mm512_set1_epi32(250), _MM_CMPINT_NLE) == 0;
}

inline __m512i codes_at(const std::uint8_t* source) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

// Any exponent: through fp32, where products out of range become infinite or subnormal.
void decode_slowly(const std::uint8_t* source, std::uint8_t exponent, std::uint8_t* target) {
  const __m512 magnitudes =
      _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  const __m512i bits = _mm512_set1_epi32(exponent == 0 ? 1 << 22 : exponent << 23);
  const __m512 values = _mm512_mul_ps(magnitudes, _mm512_castsi512_ps(bits));
  const __m512i codes = codes_at(source);
  const __m512 low = _mm512_permutexvar_ps(codes, values);
  const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values);
  _mm512_store_si512(target, join_halves(_mm512_castps_si512(low), _mm512_castps_si512(high)));
}

inline void decode_step(const std::uint8_t* source, std::int32_t added, std::uint8_t* target) {
  constexpr __mmask32 kNotZero = 0xfefefefe;
  const __m512i words = code_words(), codes = codes_at(source);
  // The low word looks up its four lowest bits, whatever the fifth: the table holds codes twice.
  const __m512i both = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 12));
  const __m512i scaled = _mm512_mask_add_epi16(words, kNotZero, words, _mm512_set1_epi32(added));
  _mm512_store_si512(target, _mm512_permutexvar_epi16(both, scaled));
}

// Decodes the steps of one row; `ahead` bytes further lie those of the next strip.
void decode_row(const std::uint8_t* packed, const std::uint8_t* scale, std::int64_t steps,
                std::int64_t ahead, std::uint8_t* target) {
  alignas(64) std::int32_t added[kScalesAtOnce];
  for (std::int64_t first = 0; first < steps; first += kScalesAtOnce) {
    const std::int64_t count = std::min(kScalesAtOnce, steps - first);
    const bool normal = exponents_of(scale + first, count, added);
    for (std::int64_t i = 0; i < count; ++i, packed += 16, target += kStripStepBytes) {
      if ((i & 3) == 0) _mm_prefetch(reinterpret_cast<const char*>(packed + ahead), _MM_HINT_T1);
      if (normal) {
        decode_step(packed, added[i], target);
      } else {
        decode_slowly(packed, scale[first + i], target);
      }
    }
  }
}

// Sixteen rows of a matrix.
struct Tile {
  const Mxfp4Matrices* matrix;
  std::int64_t row;
};

// Up to four tiles of one expert against all its tokens.
class Strip {
 public:
  Strip(const ExpertJob& job, const std::uint8_t* right, std::int64_t steps, std::int64_t ahead_rows)
      : job_(job), right_(right), steps_(steps), ahead_rows_(ahead_rows) {
    const std::int64_t blocks = (steps + kBlockSteps - 1) / kBlockSteps;
    block_ = (steps + blocks - 1) / blocks;
    left_ = static_cast<std::uint8_t*>(thread_scratch(0, steps * kStripStepBytes));
    sums_ = static_cast<float*>(thread_scratch(1, kStripTiles * kTileBytes));
  }

  void decode(const Tile* tiles, int count) {
    for (int i = 0; i < count; ++i) decode_tile(tiles[i], left_ + i * kTileBytes);
  }

  // Sums of 16 rows x 16 tokens of each tile decoded last.
  const float* run(std::int64_t row_tile, int count) {
    for (std::int64_t first = 0; first < steps_; first += block_) {
      const std::int64_t steps = std::min(block_, steps_ - first);
      const std::uint8_t* right = right_ + (row_tile * steps_ + first) * kStepBytes;
      const std::uint8_t* left = left_ + first * kStripStepBytes;
      if (count == kStripTiles) {
        multiply<kStripTiles>(left, right, steps, first == 0);
      } else {
        multiply<kStripTiles / 2>(left, right, steps, first == 0);
      }
    }
    return sums_;
  }

 private:
  void decode_tile(const Tile& tile, std::uint8_t* target) {
    const std::int64_t ahead = ahead_rows_ * tile.matrix->row_bytes();
    for (int row = 0; row < kTileRows; ++row, target += 64) {
      decode_row(tile.matrix->packed_row(job_.expert, tile.row + row),
                 tile.matrix->scale_row(job_.expert, tile.row + row), steps_, ahead, target);
    }
  }

  template <int kTiles>
  void multiply(const std::uint8_t* left, const std::uint8_t* right, std::int64_t steps,
                bool first) {
    each_tile<kTiles>([&](auto i) { tile_zero<i>(); });
    for (std::int64_t step = 0; step < steps; ++step) {
      tile_load<5>(right + 2 * kTileBytes);
      tile_load<6>(right + kTileBytes);
      tile_load<7>(right);
      each_tile<kTiles>([&](auto i) {
        tile_load<4>(left + i * kTileBytes);
        tile_multiply<i, 4, 5>();
        tile_multiply<i, 4, 6>();
        tile_multiply<i, 4, 7>();
      });
      left += kStripStepBytes;
      right += kStepBytes;
    }
    alignas(64) float fresh[kTiles * 256];
    float* target = first ? sums_ : fresh;
    each_tile<kTiles>([&](auto i) { tile_store<i>(target + i * 256); });
    for (int i = 0; !first && i < kTiles * 256; i += 16) {
      _mm512_store_ps(sums_ + i, _mm512_add_ps(_mm512_load_ps(sums_ + i), _mm512_load_ps(fresh + i)));
    }
  }

  const ExpertJob& job_;
  const std::uint8_t* right_;
  std::int64_t steps_, block_, ahead_rows_;
  std::uint8_t* left_;
  float* sums_;
};

// 32 rows of inner activations are one step of the right operand of w2.
void finish_inner(const ExpertsCall& call, const float* sums, std::uint8_t* target) {
  for (int pair = 0; pair < 16; ++pair) {
    __m512 values[2];
    for (int i = 0; i < 2; ++i) {
      const float* gate = sums + (2 * pair + i) * 16;
      values[i] = activate_512(_mm512_load_ps(gate), _mm512_load_ps(gate + 512), call.activation);
    }
    split_row_rounded(values[0], values[1], target + pair * 64);
  }
}

void inner(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows) {
  const TileSession session;
  Strip strip(job, job.x, call.inputs() / kStep, kStep);
  for (std::int64_t at = row; at < row + rows; at += kStep) {
    const Tile tiles[] = {{&call.w1, at}, {&call.w1, at + 16}, {&call.w3, at}, {&call.w3, at + 16}};
    strip.decode(tiles, kStripTiles);
    for (std::int64_t tile = 0; tile < tiles_of(job.count); ++tile) {
      finish_inner(call, strip.run(tile, kStripTiles),
                   job.inner + (tile * (call.inner() / kStep) + at / kStep) * kStepBytes);
    }
  }
}

// Adds 16 rows of results to the outputs of 16 tokens.
void finish_outer(const ExpertsCall& call, const ExpertJob& job, std::int64_t tile,
                  std::int64_t row, const float* sums) {
  __m512 values[16];
  for (int i = 0; i < 16; ++i) values[i] = _mm512_load_ps(sums + i * 16);
  transpose_16(values);
  for (std::int64_t i = 0; i < 16 && tile * 16 + i < job.count; ++i) {
    float* target = call.out + job.tokens[tile * 16 + i] * call.inputs() + row;
    const __m512 share = _mm512_set1_ps(job.shares[tile * 16 + i]);
    _mm512_storeu_ps(target, _mm512_fmadd_ps(share, values[i], _mm512_loadu_ps(target)));
  }
}

void outer(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows) {
  const TileSession session;
  Strip strip(job, job.inner, call.inner() / kStep, kStripTiles * kTileRows);
  for (std::int64_t at = row; at < row + rows; at += kStripTiles * kTileRows) {
    const int count = static_cast<int>(std::min<std::int64_t>(kStripTiles, (row + rows - at) / 16));
    const Tile tiles[] = {{&call.w2, at}, {&call.w2, at + 16}, {&call.w2, at + 32}, {&call.w2, at + 48}};
    strip.decode(tiles, count);
    for (std::int64_t tile = 0; tile < tiles_of(job.count); ++tile) {
      const float* sums = strip.run(tile, count);
      for (int i = 0; i < count; ++i) finish_outer(call, job, tile, at + i * 16, sums + i * 256);
    }
  }
}

}  // namespace

const ExpertKernels kTileExperts{prepared_bytes, prepare, inner, outer};

}  // namespace firstlight
