// Owns the running softmax of 16 query columns: greatest score, sum of weights, weighted values.
// It refuses to know where scores come from.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "attention.hpp"
#include "tiles.hpp"
#include "vector_math.hpp"

namespace firstlight {

struct Shape {
  std::int64_t steps, channel_tiles, group;
  explicit Shape(const AttentionCall& call)
      : steps((call.channels + kStep - 1) / kStep),
        channel_tiles((call.value_width() + 15) / 16),
        group(call.heads / call.kv_heads) {}
  // Floats of one column tile's state: greatest score, sum of weights, weighted values.
  std::int64_t state() const { return 32 + channel_tiles * 256; }
};

// Greatest score, sum and values of 16 columns.
struct State {
  float* at;
  float* greatest() const { return at; }
  float* total() const { return at + 16; }
  float* values() const { return at + 32; }
  void clear(const Shape& shape) const {
    std::fill(at, at + shape.state(), 0.0f);
    std::fill(at, at + 16, -INFINITY);
  }
};

// Where nothing was seen yet the greatest score is -inf; zero in its place keeps NaN away.
inline __m512 finite_or_zero(__m512 greatest) {
  const __mmask16 none =
      _mm512_cmp_ps_mask(greatest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
  return _mm512_mask_mov_ps(greatest, none, _mm512_setzero_ps());
}

// Adds what `from` saw to `into`.
inline void merge_state(const State& into, const State& from, const Shape& shape) {
  const __m512 old = _mm512_load_ps(into.greatest()), added = _mm512_load_ps(from.greatest());
  const __m512 greatest = _mm512_max_ps(old, added), base = finite_or_zero(greatest);
  const __m512 keep = exp_512(_mm512_sub_ps(old, base));
  const __m512 take = exp_512(_mm512_sub_ps(added, base));
  _mm512_store_ps(into.greatest(), greatest);
  float* target = into.total();
  const float* source = from.total();
  for (std::int64_t i = 0; i < shape.channel_tiles * 256 + 16; i += 16) {
    const __m512 kept = _mm512_mul_ps(_mm512_load_ps(target + i), keep);
    _mm512_store_ps(target + i, _mm512_fmadd_ps(_mm512_load_ps(source + i), take, kept));
  }
}

}  // namespace firstlight
