// Owns rotary position embedding with AVX-512 and the checks of attention calls.
// It refuses to know how attention is computed.
#include <immintrin.h>

#include <stdexcept>
#include <string>

#include "attention.hpp"
#include "threads.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kTokensAtOnce = 32;

__mmask16 lanes_left(std::int64_t left) {
  return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

void copy_scaled(const float* source, float* target, std::int64_t count, float scale) {
  for (std::int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = lanes_left(count - i);
    const __m512 value = _mm512_maskz_loadu_ps(mask, source + i);
    _mm512_mask_storeu_ps(target + i, mask, _mm512_mul_ps(value, _mm512_set1_ps(scale)));
  }
}

}  // namespace

void rotate_row(const float* source, float* target, std::int64_t channels, const Rotation& rotation,
                std::int64_t token, float scale) {
  const std::int64_t pairs = rotation.pairs;
  if (pairs > 0) {
    const float* cos = rotation.cos + rotation.positions[token] * pairs;
    const float* sin = rotation.sin + rotation.positions[token] * pairs;
    const __m512 factor = _mm512_set1_ps(scale);
    for (std::int64_t i = 0; i < pairs; i += 16) {
      const __mmask16 mask = lanes_left(pairs - i);
      const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i);
      const __m512 s = _mm512_maskz_loadu_ps(mask, sin + i);
      const __m512 first = _mm512_maskz_loadu_ps(mask, source + i);
      const __m512 second = _mm512_maskz_loadu_ps(mask, source + pairs + i);
      const __m512 turned_first = _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s));
      const __m512 turned_second = _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s));
      _mm512_mask_storeu_ps(target + i, mask, _mm512_mul_ps(turned_first, factor));
      _mm512_mask_storeu_ps(target + pairs + i, mask, _mm512_mul_ps(turned_second, factor));
    }
  }
  copy_scaled(source + 2 * pairs, target + 2 * pairs, channels - 2 * pairs, scale);
}

void check_positions(const Rotation& rotation, std::int64_t tokens) {
  if (rotation.pairs == 0) return;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int64_t position = rotation.positions[token];
    if (position < 0 || position >= rotation.table_rows) {
      throw std::out_of_range("position " + std::to_string(position) + " is outside the " +
                              std::to_string(rotation.table_rows) + " rows of the rotary tables");
    }
  }
}

namespace {

void check_context(const AttentionCall& call, std::int64_t b) {
  const std::int64_t context = call.contexts[b], length = call.starts[b + 1] - call.starts[b];
  const std::string name = "sequence " + std::to_string(b);
  if (context < length) {
    throw std::invalid_argument(name + ": " + std::to_string(length) + " tokens in a context of " +
                                std::to_string(context));
  }
  const std::int64_t first = call.first(b), last = call.last(b);
  if (first < 0 || last < first || last > context || first % call.slots != 0) {
    throw std::invalid_argument(name + ": positions " + std::to_string(first) + " to " +
                                std::to_string(last) + " are no segment of a context of " +
                                std::to_string(context) + " in pages of " +
                                std::to_string(call.slots));
  }
  const std::int64_t tokens = (call.k != nullptr ? context : last) - first;
  const std::int64_t needed = (tokens + call.slots - 1) / call.slots;
  if (needed > call.table_width) {
    throw std::out_of_range(name + " has " + std::to_string(tokens) + " tokens, its table only " +
                            std::to_string(call.table_width) + " pages");
  }
  for (std::int64_t i = 0; i < needed; ++i) {
    const std::int32_t page = call.table[b * call.table_width + i];
    if (page < 0 || page >= call.pages) {
      throw std::out_of_range(name + " names a page outside the " + std::to_string(call.pages) +
                              " of the cache");
    }
  }
}

}  // namespace

void check_attention(const AttentionCall& call) {
  bool cut = call.starts[0] == 0 && call.starts[call.sequences] == call.tokens;
  for (std::int64_t b = 0; b < call.sequences; ++b) cut &= call.starts[b] <= call.starts[b + 1];
  if (!cut) {
    throw std::invalid_argument("starts do not cut " + std::to_string(call.tokens) +
                                " tokens into sequences");
  }
  for (std::int64_t b = 0; b < call.sequences; ++b) check_context(call, b);
  check_positions(call.rotation, call.tokens);
}

void rotary(const RotaryCall& call) {
  each_piece(call.threads, call.tokens, kTokensAtOnce, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const auto heads = [&](const float* source, float* target, std::int64_t count) {
        for (std::int64_t i = 0; i < count * call.channels; i += call.channels) {
          rotate_row(source + i, target + i, call.channels, call.rotation, token, 1.0f);
        }
      };
      heads(call.q + token * call.q_stride, call.q_out + token * call.heads * call.channels,
            call.heads);
      heads(call.k + token * call.k_stride, call.k_out + token * call.kv_heads * call.channels,
            call.kv_heads);
    }
  });
}

}  // namespace firstlight
