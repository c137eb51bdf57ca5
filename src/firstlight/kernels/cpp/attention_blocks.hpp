// Owns how 64 cached rows become tiles, their scores against 16 queries, and their weighted values.
// It refuses to know softmax, tasks and which rows a query sees.
#pragma once
#include <algorithm>

#include "attention.hpp"
#include "attention_state.hpp"
#include "quantise.hpp"
#include "tiles.hpp"

namespace firstlight {

constexpr int kBlockKeys = 64;
constexpr int kKeyTiles = kBlockKeys / kTileRows;
constexpr int kValueSteps = kBlockKeys / kStep;

// Left tiles of values, `kApart` bytes apart, times right tiles of weights, added to sums.
template <bool kOnePart, int kApart>
void add_values(const std::uint8_t* left, std::int64_t row_bytes, const std::uint8_t* weights,
                std::int64_t tiles, float* values) {
  const auto add = [&](auto count) {
    load_sums<count>(values, false);
    for (int step = 0; step < kValueSteps; ++step) {
      step_column<count, kOnePart, kApart>(left + step * row_bytes, weights + step * kStepBytes);
    }
    store_sums<count>(values);
  };
  for (; tiles > 0; tiles -= 4, left += 4 * kApart, values += 4 * 256) {
    switch (tiles) {
      case 1: add(std::integral_constant<int, 1>{}); break;
      case 2: add(std::integral_constant<int, 2>{}); break;
      case 3: add(std::integral_constant<int, 3>{}); break;
      default: add(std::integral_constant<int, 4>{});
    }
  }
}

// Rows of floats: left tiles hold three parts of each number.
class FloatBlocks {
 public:
  static std::int64_t scratch_bytes(const AttentionCall&, const Shape& shape) {
    return (shape.steps * kKeyTiles + kValueSteps * (shape.channel_tiles + 1)) * kStepBytes;
  }

  FloatBlocks(const AttentionCall& call, const Shape& shape, std::uint8_t* scratch)
      : call_(call),
        shape_(shape),
        k_(scratch),
        v_(k_ + shape.steps * kKeyTiles * kStepBytes),
        p_(v_ + kValueSteps * shape.channel_tiles * kStepBytes) {}

  float query_scale() const { return call_.scale; }
  void prepare_query(float*) const {}

  void prefetch(std::int64_t row) const {
    for (std::int64_t i = row * call_.channels; i < (row + 1) * call_.channels; i += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(call_.keys + i), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(call_.values + i), _MM_HINT_T1);
    }
  }

  // Splits the keys, and the values transposed, of 64 rows; those numbered -1 are zero.
  void load(const std::int64_t* rows) {
    const float* value_rows[kBlockKeys];
    for (int i = 0; i < kBlockKeys; ++i) {
      const std::int64_t at = rows[i] * call_.channels;
      split_key(rows[i] < 0 ? nullptr : call_.keys + at, i);
      value_rows[i] = rows[i] < 0 ? nullptr : call_.values + at;
    }
    for (int step = 0; step < kValueSteps; ++step) {
      for (std::int64_t tile = 0; tile < shape_.channel_tiles; ++tile) {
        split_values(value_rows + step * kStep, tile,
                     v_ + (step * shape_.channel_tiles + tile) * kStepBytes);
      }
    }
  }

  void score(const std::uint8_t* q, float* scores) const {
    load_sums<kKeyTiles>(scores, true);
    for (std::int64_t step = 0; step < shape_.steps; ++step) {
      step_column<kKeyTiles>(k_ + step * kKeyTiles * kStepBytes, q + step * kStepBytes);
    }
    store_sums<kKeyTiles>(scores);
  }

  void mix(const float* weights, float* values) const {
    for (int step = 0; step < kValueSteps; ++step) {
      for (int i = 0; i < 16; ++i) {
        const float* row = weights + (step * kStep + i) * 16;
        split_row_rounded(_mm512_load_ps(row), _mm512_load_ps(row + 256),
                          p_ + step * kStepBytes + i * 64);
      }
    }
    add_values<false, kStepBytes>(v_, shape_.channel_tiles * kStepBytes, p_, shape_.channel_tiles,
                                  values);
  }

 private:
  void split_key(const float* source, int index) {
    std::uint8_t* target = k_ + index / kTileRows * kStepBytes + index % kTileRows * 64;
    for (std::int64_t step = 0; step < shape_.steps; ++step) {
      const std::int64_t left = source ? call_.channels - step * kStep : 0;
      const float* at = source ? source + step * kStep : call_.keys;
      split_row(_mm512_maskz_loadu_ps(lanes(left), at),
                _mm512_maskz_loadu_ps(lanes(left - 16), at + 16),
                target + step * kKeyTiles * kStepBytes);
    }
  }

  void split_values(const float* const* rows, std::int64_t tile, std::uint8_t* target) const {
    __m512 low[16], high[16];
    const __mmask16 mask = lanes(call_.value_width() - tile * 16);
    const auto load = [&](const float* row) {
      return row ? _mm512_maskz_loadu_ps(mask, row + tile * 16) : _mm512_setzero_ps();
    };
    for (int i = 0; i < 16; ++i) {
      low[i] = load(rows[i]);
      high[i] = load(rows[16 + i]);
    }
    transpose_16(low);
    transpose_16(high);
    for (int i = 0; i < 16; ++i) split_row(low[i], high[i], target + i * 64);
  }

  const AttentionCall& call_;
  const Shape& shape_;
  std::uint8_t *k_, *v_, *p_;
};

// Rows of INT8: a byte is exact in one part, and scales are applied to scores and to weights.
class ByteBlocks {
 public:
  static std::int64_t scratch_bytes(const AttentionCall& call, const Shape& shape) {
    const std::int64_t tiles = shape.steps * kKeyTiles + kValueSteps * shape.channel_tiles;
    const std::int64_t scales = 2 * call.bytes.groups(call.channels) * kBlockKeys * 4;
    return tiles * kTileBytes + kValueSteps * kStepBytes + scales + kBlockKeys * 64;
  }

  ByteBlocks(const AttentionCall& call, const Shape& shape, std::uint8_t* scratch)
      : call_(call),
        shape_(shape),
        groups_(call.bytes.groups(call.channels)),
        k_(scratch),
        v_(k_ + shape.steps * kKeyTiles * kTileBytes),
        p_(v_ + kValueSteps * shape.channel_tiles * kTileBytes),
        sums_(reinterpret_cast<float*>(p_ + kValueSteps * kStepBytes)),
        key_scales_(sums_ + kBlockKeys * 16),
        value_scales_(key_scales_ + groups_ * kBlockKeys) {}

  float query_scale() const { return 1.0f; }

  // Turns a query as keys are turned before they become bytes, and only then scales it.
  void prepare_query(float* row) const {
    if (call_.bytes.spread) spread_row(row, call_.channels);
    for (std::int64_t i = 0; i < call_.channels; ++i) row[i] *= call_.scale;
  }

  void prefetch(std::int64_t row) const {
    const std::int64_t begin = row * call_.channels, scale = row * groups_;
    for (std::int64_t i = begin; i < begin + call_.channels; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(call_.bytes.keys + i), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(call_.bytes.values + i), _MM_HINT_T1);
    }
    _mm_prefetch(reinterpret_cast<const char*>(call_.bytes.key_scales + scale), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(call_.bytes.value_scales + scale), _MM_HINT_T1);
  }

  void load(const std::int64_t* rows) {
    for (int i = 0; i < kBlockKeys; ++i) {
      load_key(rows[i] < 0 ? nullptr : call_.bytes.keys + rows[i] * call_.channels, i);
      for (std::int64_t group = 0; group < groups_; ++group) {
        const std::int64_t at = rows[i] * groups_ + group;
        key_scales_[group * kBlockKeys + i] = scale(call_.bytes.key_scales, rows[i], at);
        value_scales_[group * kBlockKeys + i] = scale(call_.bytes.value_scales, rows[i], at);
      }
    }
    for (int step = 0; step < kValueSteps; ++step) {
      for (std::int64_t tile = 0; tile < shape_.channel_tiles; ++tile) {
        load_values(rows + step * kStep, tile,
                    v_ + (step * shape_.channel_tiles + tile) * kTileBytes);
      }
    }
  }

  void score(const std::uint8_t* q, float* scores) const {
    const std::int64_t steps_of_group = groups_ == 1 ? shape_.steps : call_.bytes.group / kStep;
    for (std::int64_t group = 0; group < groups_; ++group) {
      const std::int64_t first = group * steps_of_group;
      const std::int64_t last = std::min(shape_.steps, first + steps_of_group);
      load_sums<kKeyTiles>(sums_, true);
      for (std::int64_t step = first; step < last; ++step) {
        step_column<kKeyTiles, true, kTileBytes>(k_ + step * kKeyTiles * kTileBytes,
                                                 q + step * kStepBytes);
      }
      store_sums<kKeyTiles>(sums_);
      const float* scales = key_scales_ + group * kBlockKeys;
      for (int i = 0; i < kBlockKeys; ++i) {
        const __m512 factor = _mm512_set1_ps(scales[i]), sum = _mm512_load_ps(sums_ + i * 16);
        const __m512 before = group == 0 ? _mm512_setzero_ps() : _mm512_load_ps(scores + i * 16);
        _mm512_store_ps(scores + i * 16, _mm512_fmadd_ps(sum, factor, before));
      }
    }
  }

  void mix(const float* weights, float* values) const {
    const std::int64_t most = groups_ == 1 ? shape_.channel_tiles : call_.bytes.group / 16;
    for (std::int64_t group = 0; group * most < shape_.channel_tiles; ++group) {
      const float* scales = value_scales_ + group * kBlockKeys;
      for (int step = 0; step < kValueSteps; ++step) {
        for (int i = 0; i < 16; ++i) {
          const int key = step * kStep + i;
          const __m512 low = _mm512_load_ps(weights + key * 16);
          const __m512 high = _mm512_load_ps(weights + (key + 16) * 16);
          split_row_rounded(_mm512_mul_ps(low, _mm512_set1_ps(scales[key])),
                            _mm512_mul_ps(high, _mm512_set1_ps(scales[key + 16])),
                            p_ + step * kStepBytes + i * 64);
        }
      }
      const std::int64_t first = group * most;
      add_values<true, kTileBytes>(v_ + first * kTileBytes, shape_.channel_tiles * kTileBytes, p_,
                                   std::min(most, shape_.channel_tiles - first),
                                   values + first * 256);
    }
  }

 private:
  static float scale(const std::uint16_t* scales, std::int64_t row, std::int64_t at) {
    return row < 0 ? 0.0f : _cvtsh_ss(scales[at]);
  }

  // Up to 16 bytes as floats' bits, whose high halves are exact.
  static __m512i widened(const std::int8_t* source, __mmask16 mask) {
    const __m128i bytes = _mm_maskz_loadu_epi8(mask, source);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  }

  void load_key(const std::int8_t* source, int index) {
    std::uint8_t* target = k_ + index / kTileRows * kTileBytes + index % kTileRows * 64;
    for (std::int64_t step = 0; step < shape_.steps; ++step) {
      const std::int64_t left = source ? call_.channels - step * kStep : 0;
      const std::int8_t* at = source ? source + step * kStep : call_.bytes.keys;
      _mm512_store_si512(target + step * kKeyTiles * kTileBytes,
                         join_halves(widened(at, lanes(left)), widened(at + 16, lanes(left - 16))));
    }
  }

  // A dword of a row pairs keys i and i + 16 of one channel: joined first, then transposed.
  void load_values(const std::int64_t* rows, std::int64_t tile, std::uint8_t* target) const {
    __m512 pairs[16];
    const __mmask16 mask = lanes(call_.value_width() - tile * 16);
    const auto load = [&](std::int64_t row) {
      if (row < 0) return _mm512_setzero_si512();
      return widened(call_.bytes.values + row * call_.channels + tile * 16, mask);
    };
    for (int i = 0; i < 16; ++i) {
      pairs[i] = _mm512_castsi512_ps(join_halves(load(rows[i]), load(rows[16 + i])));
    }
    transpose_16(pairs);
    for (int i = 0; i < 16; ++i) _mm512_store_ps(target + i * 64, pairs[i]);
  }

  const AttentionCall& call_;
  const Shape& shape_;
  std::int64_t groups_;
  std::uint8_t *k_, *v_, *p_;
  float *sums_, *key_scales_, *value_scales_;
};

}  // namespace firstlight
