// Owns the gated delta rule by chunks of 16 tokens with AVX-512.
// It refuses to know Python, torch and who owns the slots.
//
// With G the running sum of decays in a chunk: A[t, j] = beta_t <k_t exp(G_t - G_j), k_j> for j < t,
// P[t, j] = <q_t exp(G_t - G_j), k_j> for j <= t; E solves (I + A) E = beta (V - (K exp G) S);
// O = (Q exp G) S + P E; S <- diag(exp G_C) S + (K exp(G_C - G))^T E.
// A chunk is one vector of tokens: what belongs to a key channel is a vector over tokens, and the
// state stands in blocks of 32 columns [keys][32], so that a block stays in the first-level cache.
// For heads of 128 x 128 longer chunks only add products: most work is the three with S.
#include <immintrin.h>

#include <algorithm>

#include "delta_rule.hpp"
#include "prefetch.hpp"
#include "threads.hpp"
#include "tiles.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr int kChunk = 16;
constexpr int kBlockColumns = 32;
// exp(G_t) and exp(-G_j) apart stay finite while no channel decays by more than this in a chunk.
constexpr float kMostDecay = 84.0f;

// What a chunk needs, by key channel; tokens that don't exist are zero and change nothing.
struct Chunk {
  std::int64_t keys;       // a multiple of 16
  float *both;             // [keys][32]: k exp G, then q exp G
  float *key, *query;      // [keys][16]
  float *sums;             // [keys][16]: G
  float *grown;            // [keys][16]: k exp(-G)
  float *to_end;           // [keys][16]: k exp(G_C - G)
  float *kept;             // [keys]: exp G_C
  float *among, *asked;    // [16][16]: A and P
  float *products;         // [32][32]: (K exp G) S, then (Q exp G) S
  float *state;            // [blocks][keys][32]

  static std::int64_t floats(std::int64_t keys, std::int64_t blocks) {
    return keys * (32 + 5 * 16 + 1) + 2 * 256 + 32 * 32 + blocks * keys * kBlockColumns + 64;
  }
  Chunk(std::int64_t wanted_keys, std::int64_t blocks) : keys((wanted_keys + 15) / 16 * 16) {
    auto* at = static_cast<float*>(thread_scratch(0, floats(keys, blocks) * 4));
    const auto take = [&](std::int64_t count) {
      float* found = at;
      at += (count + 15) / 16 * 16;
      return found;
    };
    both = take(keys * 32);
    key = take(keys * 16);
    query = take(keys * 16);
    sums = take(keys * 16);
    grown = take(keys * 16);
    to_end = take(keys * 16);
    kept = take(keys);
    among = take(256);
    asked = take(256);
    products = take(32 * 32);
    state = take(blocks * keys * kBlockColumns);
  }
};

// 16 tokens by 16 channels; what doesn't exist is zero.
void load_16(const float* source, std::int64_t stride, std::int64_t tokens, std::int64_t channels,
             __m512 (&rows)[16]) {
  for (int t = 0; t < 16; ++t) {
    rows[t] = t < tokens ? _mm512_maskz_loadu_ps(lanes(channels), source + t * stride)
                         : _mm512_setzero_ps();
  }
}

// Fills everything by key channel; returns whether decays are moderate.
bool read_chunk(const DeltaCall& call, const DeltaHead& head, std::int64_t first,
                const Chunk& chunk) {
  const std::int64_t tokens = std::min<std::int64_t>(kChunk, head.tokens - first);
  bool moderate = true;
  for (std::int64_t part = 0; part < chunk.keys; part += 16) {
    __m512 k[16], q[16], sums[16];
    const std::int64_t left = call.keys - part;
    load_16(head.k + first * call.k_stride + part, call.k_stride, tokens, left, k);
    load_16(head.q + first * call.q_stride + part, call.q_stride, tokens, left, q);
    load_16(head.decay + first * call.decay_stride + part, call.decay_stride, tokens, left, sums);
    for (int t = 1; t < 16; ++t) sums[t] = _mm512_add_ps(sums[t - 1], sums[t]);
    const __m512 total = sums[15];
    moderate &= _mm512_cmp_ps_mask(total, _mm512_set1_ps(-kMostDecay), _CMP_NGE_UQ) == 0;
    _mm512_store_ps(chunk.kept + part, exp_512(total));
    transpose_16(k);
    transpose_16(q);
    transpose_16(sums);
    const __m512i last = _mm512_set1_epi32(15);
    for (int c = 0; c < 16; ++c) {
      const std::int64_t at = (part + c) * 16;
      const __m512 grown = exp_512(_mm512_sub_ps(_mm512_setzero_ps(), sums[c]));
      const __m512 decayed = exp_512(sums[c]);
      const __m512 left_over = _mm512_sub_ps(_mm512_permutexvar_ps(last, sums[c]), sums[c]);
      _mm512_store_ps(chunk.key + at, k[c]);
      _mm512_store_ps(chunk.query + at, q[c]);
      _mm512_store_ps(chunk.sums + at, sums[c]);
      _mm512_store_ps(chunk.grown + at, _mm512_mul_ps(k[c], grown));
      _mm512_store_ps(chunk.to_end + at, _mm512_mul_ps(k[c], exp_512(left_over)));
      _mm512_store_ps(chunk.both + 2 * at, _mm512_mul_ps(k[c], decayed));
      _mm512_store_ps(chunk.both + 2 * at + 16, _mm512_mul_ps(q[c], decayed));
    }
  }
  return moderate;
}

// rows[t] = sum over channels of left[channel][t] * right[channel][all j].
void multiply_16(const float* left, std::int64_t left_stride, const float* right,
                 std::int64_t channels, __m512 (&rows)[16]) {
  for (__m512& row : rows) row = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < channels; ++i) {
    const __m512 at = _mm512_load_ps(right + i * 16);
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      rows[t] = _mm512_fmadd_ps(_mm512_set1_ps(left[i * left_stride + t]), at, rows[t]);
    }
  }
}

// The same products with decays taken pair by pair, whatever their size; later tokens are cut off
// before the exponential, where it would overflow.
void multiply_pairs(const Chunk& chunk, __m512 (&among)[16], __m512 (&asked)[16]) {
  for (int t = 0; t < 16; ++t) {
    among[t] = asked[t] = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < chunk.keys; ++i) {
      const std::int64_t at = i * 16;
      const __m512 apart = _mm512_sub_ps(_mm512_set1_ps(chunk.sums[at + t]),
                                         _mm512_load_ps(chunk.sums + at));
      const __m512 decay = exp_512(_mm512_min_ps(_mm512_setzero_ps(), apart));
      const __m512 decayed = _mm512_mul_ps(decay, _mm512_load_ps(chunk.key + at));
      among[t] = _mm512_fmadd_ps(_mm512_set1_ps(chunk.key[at + t]), decayed, among[t]);
      asked[t] = _mm512_fmadd_ps(_mm512_set1_ps(chunk.query[at + t]), decayed, asked[t]);
    }
  }
}

// A and P of the chunk.
void relate_tokens(const Chunk& chunk, bool moderate, const float* beta) {
  __m512 among[16], asked[16];
  if (moderate) {
    multiply_16(chunk.both, 32, chunk.grown, chunk.keys, among);
    multiply_16(chunk.both + 16, 32, chunk.grown, chunk.keys, asked);
  } else {
    multiply_pairs(chunk, among, asked);
  }
  for (int t = 0; t < 16; ++t) {
    const auto before = static_cast<__mmask16>((1u << t) - 1);
    const auto until = static_cast<__mmask16>((2u << t) - 1);
    _mm512_store_ps(chunk.among + t * 16,
                    _mm512_maskz_mul_ps(before, among[t], _mm512_set1_ps(beta[t])));
    _mm512_store_ps(chunk.asked + t * 16, _mm512_maskz_mov_ps(until, asked[t]));
  }
}

// Products of the chunk's keys and queries with a block of the state.
void multiply_state(const Chunk& chunk, const float* state) {
  for (int first = 0; first < 32; first += 8) {
    __m512 sums[8][2];
    for (auto& line : sums) line[0] = line[1] = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < chunk.keys; ++i) {
      const __m512 a = _mm512_load_ps(state + i * 32), b = _mm512_load_ps(state + i * 32 + 16);
#pragma GCC unroll 8
      for (int t = 0; t < 8; ++t) {
        const __m512 x = _mm512_set1_ps(chunk.both[i * 32 + first + t]);
        sums[t][0] = _mm512_fmadd_ps(x, a, sums[t][0]);
        sums[t][1] = _mm512_fmadd_ps(x, b, sums[t][1]);
      }
    }
    for (int t = 0; t < 8; ++t) {
      _mm512_store_ps(chunk.products + (first + t) * 32, sums[t][0]);
      _mm512_store_ps(chunk.products + (first + t) * 32 + 16, sums[t][1]);
    }
  }
}

// Sixteen columns of the values of a chunk.
struct Columns {
  const float* v;
  std::int64_t v_stride;
  float* out;
  std::int64_t out_stride, tokens;
  __mmask16 mask;
};

// E by forward substitution, O, and the new state, for 16 columns `part` of a block.
void finish_columns(const Chunk& chunk, const Columns& columns, const float* beta, int part,
                    float* state) {
  __m512 error[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) {
    const __m512 known = _mm512_load_ps(chunk.products + t * 32 + part * 16);
    const __m512 v = t < columns.tokens
                         ? _mm512_maskz_loadu_ps(columns.mask, columns.v + t * columns.v_stride)
                         : _mm512_setzero_ps();
    __m512 wanted = _mm512_mul_ps(_mm512_set1_ps(beta[t]), _mm512_sub_ps(v, known));
#pragma GCC unroll 16
    for (int j = 0; j < t; ++j) {
      wanted = _mm512_fnmadd_ps(_mm512_set1_ps(chunk.among[t * 16 + j]), error[j], wanted);
    }
    error[t] = wanted;
  }
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) {
    __m512 value = _mm512_load_ps(chunk.products + (16 + t) * 32 + part * 16);
#pragma GCC unroll 16
    for (int j = 0; j <= t; ++j) {
      value = _mm512_fmadd_ps(_mm512_set1_ps(chunk.asked[t * 16 + j]), error[j], value);
    }
    if (t < columns.tokens) {
      _mm512_mask_storeu_ps(columns.out + t * columns.out_stride, columns.mask, value);
    }
  }
  for (std::int64_t i = 0; i < chunk.keys; ++i) {
    float* at = state + i * 32 + part * 16;
    __m512 first = _mm512_mul_ps(_mm512_set1_ps(chunk.kept[i]), _mm512_load_ps(at));
    __m512 second = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int j = 0; j < 16; j += 2) {
      first = _mm512_fmadd_ps(_mm512_set1_ps(chunk.to_end[i * 16 + j]), error[j], first);
      second = _mm512_fmadd_ps(_mm512_set1_ps(chunk.to_end[i * 16 + j + 1]), error[j + 1], second);
    }
    _mm512_store_ps(at, _mm512_add_ps(first, second));
  }
}

// Moves a state into blocks, or back.
template <bool kIn>
void move_state(const DeltaCall& call, const Chunk& chunk, float* state) {
  for (std::int64_t column = 0; column < call.values; column += 16) {
    float* block = chunk.state + column / 32 * chunk.keys * 32 + column % 32;
    const __mmask16 mask = lanes(call.values - column);
    for (std::int64_t i = 0; i < call.keys; ++i) {
      float* row = state + i * call.values + column;
      if (kIn) {
        _mm512_store_ps(block + i * 32, _mm512_maskz_loadu_ps(mask, row));
      } else {
        _mm512_mask_storeu_ps(row, mask, _mm512_load_ps(block + i * 32));
      }
    }
  }
}

// Fetches one of the inputs of the next chunk: rows of one head stand far apart.
void fetch_ahead(const DeltaCall& call, const DeltaHead& head, std::int64_t first,
                 std::int64_t index) {
  const float* const inputs[] = {head.k, head.q, head.decay, head.v};
  const std::int64_t strides[] = {call.k_stride, call.q_stride, call.decay_stride, call.v_stride};
  if (index >= 4) return;
  const std::int64_t width = index < 3 ? call.keys : call.values;
  for (std::int64_t t = first; t < std::min(first + kChunk, head.tokens); ++t) {
    for (std::int64_t i = 0; i < width; i += 16) {
      fetch_line(inputs[index] + t * strides[index] + i);
    }
  }
}

void run_chunk(const DeltaCall& call, const DeltaHead& head, std::int64_t first,
               const Chunk& chunk) {
  const std::int64_t tokens = std::min<std::int64_t>(kChunk, head.tokens - first);
  float beta[kChunk] = {};
  for (std::int64_t t = 0; t < tokens; ++t) beta[t] = head.beta[(first + t) * call.beta_stride];
  relate_tokens(chunk, read_chunk(call, head, first, chunk), beta);
  const std::int64_t out_stride = call.heads * call.values;
  for (std::int64_t column = 0; column < call.values; column += 32) {
    float* state = chunk.state + column * chunk.keys;
    fetch_ahead(call, head, first + kChunk, column / 32);
    multiply_state(chunk, state);
    for (int part = 0; part < 2 && column + part * 16 < call.values; ++part) {
      const std::int64_t at = column + part * 16;
      const Columns columns{head.v + first * call.v_stride + at, call.v_stride,
                            head.out + first * out_stride + at, out_stride, tokens,
                            lanes(call.values - at)};
      finish_columns(chunk, columns, beta, part, state);
    }
  }
}

}  // namespace

void chunked_delta_rule(const DeltaCall& call, const DeltaHead& head) {
  const std::int64_t blocks = (call.values + kBlockColumns - 1) / kBlockColumns;
  const Chunk chunk(call.keys, blocks);
  std::fill(chunk.state, chunk.state + blocks * chunk.keys * kBlockColumns, 0.0f);
  move_state<true>(call, chunk, head.state);
  for (std::int64_t first = 0; first < head.tokens; first += kChunk) {
    run_chunk(call, head, first, chunk);
  }
  move_state<false>(call, chunk, head.state);
}

}  // namespace firstlight
