// Owns the gated delta rule token by token with AVX-512, and which sequences go by chunks instead.
// It refuses to know Python, torch and who owns the slots.
#include "delta_rule.hpp"

#include <immintrin.h>

#include <algorithm>

#include "threads.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

// Shorter spans go token by token: measured crossover (benchmarks/kda_prefill.py).
constexpr std::int64_t kChunkedFrom = 12;
constexpr int kColumns = 4;  // vectors of a state's row handled at once

std::int64_t padded(std::int64_t count) { return (count + 15) / 16 * 16; }

inline __mmask16 lanes_left(std::int64_t left) {
  return left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
}

// What one token needs of its keys: exp(decay), and k and q times it.
struct Token {
  float *kept, *key, *query;
  const float* plain_key;
  float key_query;  // <k, q>
};

Token read_token(const DeltaCall& call, const DeltaHead& head, std::int64_t index, float* scratch) {
  const std::int64_t width = padded(call.keys);
  const float* k = head.k + index * call.k_stride;
  const float* q = head.q + index * call.q_stride;
  const float* decay = head.decay + index * call.decay_stride;
  const Token token{scratch, scratch + width, scratch + 2 * width, k, 0.0f};
  __m512 dot = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < call.keys; i += 16) {
    const __mmask16 mask = lanes_left(call.keys - i);
    const __m512 kept = exp_512(_mm512_maskz_loadu_ps(mask, decay + i));
    const __m512 key = _mm512_maskz_loadu_ps(mask, k + i);
    const __m512 query = _mm512_maskz_loadu_ps(mask, q + i);
    _mm512_store_ps(token.kept + i, kept);
    _mm512_store_ps(token.key + i, _mm512_mul_ps(kept, key));
    _mm512_store_ps(token.query + i, _mm512_mul_ps(kept, query));
    dot = _mm512_fmadd_ps(key, query, dot);
  }
  return {token.kept, token.key, token.query, k, _mm512_reduce_add_ps(dot)};
}

// Some columns of the state. The output is (old S)^T (q exp decay) + <k, q> e: one pass reads the
// old state for both sums, a second one brings it up to date.
template <int kCount>
void advance(const DeltaCall& call, const Token& token, const float* v, float beta,
             const __mmask16 (&masks)[kCount], float* state, float* out) {
  __m512 known[kCount], asked[kCount];
  for (int c = 0; c < kCount; ++c) known[c] = asked[c] = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < call.keys; ++i) {
    const __m512 key = _mm512_set1_ps(token.key[i]), query = _mm512_set1_ps(token.query[i]);
    for (int c = 0; c < kCount; ++c) {
      const __m512 old = _mm512_maskz_loadu_ps(masks[c], state + i * call.values + c * 16);
      known[c] = _mm512_fmadd_ps(old, key, known[c]);
      asked[c] = _mm512_fmadd_ps(old, query, asked[c]);
    }
  }
  __m512 error[kCount];
  for (int c = 0; c < kCount; ++c) {
    const __m512 wanted = _mm512_sub_ps(_mm512_maskz_loadu_ps(masks[c], v + c * 16), known[c]);
    error[c] = _mm512_mul_ps(_mm512_set1_ps(beta), wanted);
    const __m512 value = _mm512_fmadd_ps(_mm512_set1_ps(token.key_query), error[c], asked[c]);
    _mm512_mask_storeu_ps(out + c * 16, masks[c], value);
  }
  for (std::int64_t i = 0; i < call.keys; ++i) {
    const __m512 kept = _mm512_set1_ps(token.kept[i]), key = _mm512_set1_ps(token.plain_key[i]);
    for (int c = 0; c < kCount; ++c) {
      float* at = state + i * call.values + c * 16;
      const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(masks[c], at), kept);
      _mm512_mask_storeu_ps(at, masks[c], _mm512_fmadd_ps(key, error[c], old));
    }
  }
}

DeltaHead head_of(const DeltaCall& call, std::int64_t sequence, std::int64_t head) {
  const std::int64_t begin = call.spans.starts[sequence], end = call.spans.starts[sequence + 1];
  DeltaHead found;
  found.q = call.q + begin * call.q_stride + head * call.keys;
  found.k = call.k + begin * call.k_stride + head * call.keys;
  found.v = call.v + begin * call.v_stride + head * call.values;
  found.decay = call.decay + begin * call.decay_stride + head * call.keys;
  found.beta = call.beta + begin * call.beta_stride + head;
  found.out = call.out + (begin * call.heads + head) * call.values;
  found.tokens = end - begin;
  const std::int64_t size = call.keys * call.values;
  const bool kept = call.matrices != nullptr;
  found.state = kept ? call.matrices + call.spans.slots[sequence] * call.slot_stride + head * size
                     : static_cast<float*>(thread_scratch(3, size * 4));
  if (!kept || call.spans.fresh[sequence]) std::fill(found.state, found.state + size, 0.0f);
  return found;
}

}  // namespace

void recurrent_delta_rule(const DeltaCall& call, const DeltaHead& head) {
  auto* scratch = static_cast<float*>(thread_scratch(1, 3 * padded(call.keys) * 4));
  for (std::int64_t t = 0; t < head.tokens; ++t) {
    const Token token = read_token(call, head, t, scratch);
    const float beta = head.beta[t * call.beta_stride];
    const float* v = head.v + t * call.v_stride;
    float* out = head.out + t * call.heads * call.values;
    for (std::int64_t column = 0; column < call.values; column += 16 * kColumns) {
      const std::int64_t left = call.values - column;
      if (left >= 16 * kColumns) {
        constexpr __mmask16 kAll[kColumns] = {0xffff, 0xffff, 0xffff, 0xffff};
        advance<kColumns>(call, token, v + column, beta, kAll, head.state + column, out + column);
      } else {
        const __mmask16 some[kColumns] = {lanes_left(left), lanes_left(left - 16),
                                          lanes_left(left - 32), lanes_left(left - 48)};
        advance<kColumns>(call, token, v + column, beta, some, head.state + column, out + column);
      }
    }
  }
}

void delta_rule(const DeltaCall& call) {
  const std::int64_t tokens = call.spans.starts[call.spans.sequences];
  const std::int64_t pieces = call.spans.sequences * call.heads;
  const bool small = tokens * call.heads * call.keys * call.values < (64 << 10);
  each_piece(small ? 1 : call.threads, pieces, 1, [&](std::int64_t piece, std::int64_t) {
    const std::int64_t sequence = piece / call.heads;
    if (call.spans.starts[sequence] == call.spans.starts[sequence + 1]) return;
    const DeltaHead head = head_of(call, sequence, piece % call.heads);
    if (head.tokens >= kChunkedFrom) {
      chunked_delta_rule(call, head);
    } else {
      recurrent_delta_rule(call, head);
    }
  });
}

}  // namespace firstlight
