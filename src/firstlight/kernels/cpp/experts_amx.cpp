// Owns MXFP4 experts for many tokens on AMX tiles: codes become bf16, exactly, tile by tile.
// It refuses to know Python, torch and which tokens chose an expert.
//
// A code times its scale is a bf16 number, so the weight is one part; the other operand, 16 tokens,
// has the three parts of tiles.hpp. Dword p of a tile row pairs channels 2 p and 2 p + 1, as the
// codes lie in memory. Blocks of steps are summed apart, as in linear_amx.cpp.
#include <algorithm>

#include "experts.hpp"
#include "prefetch.hpp"
#include "threads.hpp"
#include "tiles.hpp"

namespace firstlight {
namespace {

constexpr int kStripTiles = 2;                   // of 16 rows
constexpr std::int64_t kBlockSteps = 56;         // summed in the tiles
constexpr std::int64_t kQuad = 4;                // steps of 64 bytes of a row
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

// What an exponent adds to that of a bf16 number, in both halves of a dword.
struct AddedExponents {
  std::uint32_t at[256];
  constexpr AddedExponents() : at() {
    for (int i = 0; i < 256; ++i) {
      const std::uint32_t word = static_cast<std::uint32_t>((i - 127) * 128) & 0xffff;
      at[i] = word << 16 | word;
    }
  }
};
constexpr AddedExponents kAdded;

// Whether every code times 2^(s - 127) is a normal number or zero, for all these exponents s.
bool all_normal(const std::uint8_t* exponents, std::int64_t count) {
  __mmask64 strange = 0;
  for (std::int64_t i = 0; i < count; i += 64) {
    const __mmask64 mask = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
    const __m512i from_two =
        _mm512_sub_epi8(_mm512_maskz_loadu_epi8(mask, exponents + i), _mm512_set1_epi8(2));
    strange |= _mm512_mask_cmp_epu8_mask(mask, from_two, _mm512_set1_epi8(static_cast<char>(250)),
                                         _MM_CMPINT_NLE);
  }
  return strange == 0;
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

inline void decode_step(const std::uint8_t* source, std::uint8_t exponent, std::uint8_t* target) {
  constexpr __mmask32 kNotZero = 0xfefefefe;
  const __m512i words = code_words(), codes = codes_at(source);
  const __m512i added = _mm512_set1_epi32(static_cast<std::int32_t>(kAdded.at[exponent]));
  // The low word looks up its four lowest bits, whatever the fifth: the table holds codes twice.
  const __m512i both = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 12));
  const __m512i scaled = _mm512_mask_add_epi16(words, kNotZero, words, added);
  _mm512_store_si512(target, _mm512_permutexvar_epi16(both, scaled));
}

// Sixteen rows of a matrix.
struct Tile {
  const Mxfp4Matrices* matrix;
  std::int64_t row;
};

// Two tiles of one expert against all its tokens. The strip is decoded while it meets the
// first 16 tokens, four steps (one line of every row) ahead of their products: decoding and tiles
// overlap, and tile loads don't wait for stores. Its decoded form is kept only for further tokens.
class Strip {
 public:
  Strip(const ExpertJob& job, const std::uint8_t* right, std::int64_t steps, std::int64_t ahead_rows)
      : job_(job), right_(right), steps_(steps), ahead_rows_(ahead_rows) {
    kept_quads_ = tiles_of(job.count) > 1 ? (steps + kQuad - 1) / kQuad : 2;
    left_ = static_cast<std::uint8_t*>(
        thread_scratch(0, kept_quads_ * kQuad * kStripStepBytes));
    sums_ = static_cast<float*>(thread_scratch(1, kStripTiles * kTileBytes));
  }

  // Sums of 16 rows x the first 16 tokens of each tile.
  const float* start(const Tile (&tiles)[kStripTiles]) {
    bool normal = true;
    for (const Tile& tile : tiles) {
      normal &= all_normal(tile.matrix->scale_row(job_.expert, tile.row),
                           kTileRows * tile.matrix->scale_bytes());
    }
    normal ? start_some<true>(tiles) : start_some<false>(tiles);
    return sums_;
  }

  // The same of any other 16 tokens.
  const float* run(std::int64_t row_tile) {
    for (std::int64_t first = 0; first < steps_; first += kBlockSteps) {
      const std::int64_t steps = std::min(kBlockSteps, steps_ - first);
      const std::uint8_t* right = right_ + (row_tile * steps_ + first) * kStepBytes;
      const std::uint8_t* left = left_ + first * kStripStepBytes;
      zero_sums();
      for (std::int64_t step = 0; step < steps; ++step) {
        multiply_step(left + step * kStripStepBytes, right + step * kStepBytes);
      }
      take_sums(first == 0);
    }
    return sums_;
  }

 private:
  std::uint8_t* left_of(std::int64_t quad) const {
    return left_ + quad % kept_quads_ * kQuad * kStripStepBytes;
  }

  template <bool kNormal>
  void decode(const Tile& tile, int index, std::int64_t quad) const {
    const std::int64_t row_bytes = tile.matrix->row_bytes();
    const std::int64_t scale_bytes = tile.matrix->scale_bytes();
    const std::uint8_t* packed = tile.matrix->packed_row(job_.expert, tile.row) + quad * 64;
    const std::uint8_t* scale = tile.matrix->scale_row(job_.expert, tile.row) + quad * kQuad;
    const std::int64_t steps = std::min(kQuad, steps_ - quad * kQuad);
    std::uint8_t* target = left_of(quad) + index * kTileBytes;
    for (int row = 0; row < kTileRows; ++row, target += 64) {
      for (std::int64_t step = 0; step < steps; ++step) {
        if constexpr (kNormal) {
          decode_step(packed + step * 16, scale[step], target + step * kStripStepBytes);
        } else {
          decode_slowly(packed + step * 16, scale[step], target + step * kStripStepBytes);
        }
      }
      packed += row_bytes;
      scale += scale_bytes;
    }
  }

  // A quarter of a quad of the next strip: spread out, its lines come while tiles multiply.
  void fetch_ahead(const Tile (&tiles)[kStripTiles], std::int64_t quad, std::int64_t step) const {
    for (const Tile& tile : tiles) {
      const std::int64_t row = tile.row + ahead_rows_ + 4 * step;
      const std::uint8_t* at = tile.matrix->packed_row(job_.expert, row) + quad * 64;
      for (int i = 0; i < 4; ++i, at += tile.matrix->row_bytes()) fetch_line(at);
    }
  }

  template <bool kNormal>
  void start_some(const Tile (&tiles)[kStripTiles]) {
    const std::int64_t quads = (steps_ + kQuad - 1) / kQuad;
    for (int i = 0; i < kStripTiles; ++i) decode<kNormal>(tiles[i], i, 0);
    for (std::int64_t quad = 0; quad < quads; ++quad) {
      const std::int64_t first = quad * kQuad, steps = std::min(kQuad, steps_ - first);
      if (first % kBlockSteps == 0) zero_sums();
      for (std::int64_t step = 0; step < kQuad; ++step) {
        fetch_ahead(tiles, quad, step);
        if (step < steps) {
          multiply_step(left_of(quad) + step * kStripStepBytes,
                        right_ + (first + step) * kStepBytes);
        }
        if (step < kStripTiles && quad + 1 < quads) {
          decode<kNormal>(tiles[step], static_cast<int>(step), quad + 1);
        }
      }
      if (quad + 1 == quads || (first + kQuad) % kBlockSteps == 0) {
        take_sums(first < kBlockSteps);
      }
    }
  }

  static void zero_sums() {
    each_tile<4>([&](auto i) { tile_zero<i>(); });
  }

  // Sums 0 and 1 take the first part of the tokens, 2 and 3 the others: a chain of products on one
  // sum would wait for each of them to end.
  static void multiply_step(const std::uint8_t* left, const std::uint8_t* right) {
    tile_load<4>(left);
    tile_load<5>(left + kTileBytes);
    tile_load<6>(right);
    tile_load<7>(right + 2 * kTileBytes);
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 5, 6>();
    tile_multiply<2, 4, 7>();
    tile_multiply<3, 5, 7>();
    tile_load<6>(right + kTileBytes);
    tile_multiply<2, 4, 6>();
    tile_multiply<3, 5, 6>();
  }

  // A block's sums: as they are from the first block, else added.
  void take_sums(bool first) {
    alignas(64) float fresh[4 * 256];
    each_tile<4>([&](auto i) { tile_store<i>(fresh + i * 256); });
    for (int i = 0; i < kStripTiles * 256; i += 16) {
      __m512 sum = _mm512_add_ps(_mm512_load_ps(fresh + 512 + i), _mm512_load_ps(fresh + i));
      if (!first) sum = _mm512_add_ps(_mm512_load_ps(sums_ + i), sum);
      _mm512_store_ps(sums_ + i, sum);
    }
  }

  const ExpertJob& job_;
  const std::uint8_t* right_;
  std::int64_t steps_, ahead_rows_, kept_quads_;
  std::uint8_t* left_;
  float* sums_;
};

// 16 rows of inner activations are half a step of the right operand of w2.
void finish_inner(const ExpertsCall& call, const float* sums, std::uint8_t* target) {
  for (int pair = 0; pair < 8; ++pair) {
    __m512 values[2];
    for (int i = 0; i < 2; ++i) {
      const float* gate = sums + (2 * pair + i) * 16;
      values[i] = activate_512(_mm512_load_ps(gate), _mm512_load_ps(gate + 256), call.activation);
    }
    split_row_rounded(values[0], values[1], target + pair * 64);
  }
}

void inner(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows) {
  const TileSession session;
  Strip strip(job, job.x, call.inputs() / kStep, kTileRows);
  for (std::int64_t at = row; at < row + rows; at += kTileRows) {
    const Tile tiles[] = {{&call.w1, at}, {&call.w3, at}};
    std::uint8_t* target = job.inner + at / kStep * kStepBytes + at % kStep * 32;
    for (std::int64_t tile = 0; tile < tiles_of(job.count); ++tile) {
      finish_inner(call, tile == 0 ? strip.start(tiles) : strip.run(tile), target);
      target += call.inner() / kStep * kStepBytes;
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
    const Tile tiles[] = {{&call.w2, at}, {&call.w2, at + kTileRows}};
    for (std::int64_t tile = 0; tile < tiles_of(job.count); ++tile) {
      const float* sums = tile == 0 ? strip.start(tiles) : strip.run(tile);
      finish_outer(call, job, tile, at, sums);
      finish_outer(call, job, tile, at + kTileRows, sums + 256);
    }
  }
}

}  // namespace

const ExpertKernels kTileExperts{prepared_bytes, prepare, inner, outer};

}  // namespace firstlight
