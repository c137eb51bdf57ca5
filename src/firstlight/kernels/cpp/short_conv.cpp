// Owns the short causal convolution of single channels and its SiLU, with AVX-512.
// It refuses to know Python, torch and who owns the slots.
#include <immintrin.h>

#include <algorithm>

#include "delta_rule.hpp"
#include "threads.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kChannelsAtOnce = 256;

inline __mmask16 lanes_left(std::int64_t left) {
  return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

// Sixteen channels of one sequence: the window holds the last taps - 1 inputs, the oldest first.
struct Window {
  const ConvolutionCall& call;
  std::int64_t channel;
  __mmask16 mask;
  __m512 inputs[kMostTaps], weights[kMostTaps];

  Window(const ConvolutionCall& of, std::int64_t first)
      : call(of), channel(first), mask(lanes_left(of.channels - first)) {
    const __m512i index = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(static_cast<std::int32_t>(of.taps)));
    for (std::int64_t tap = 0; tap < of.taps; ++tap) {
      weights[tap] = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, index,
                                              of.weight + first * of.taps + tap, 4);
    }
  }

  float* slot(std::int64_t sequence, std::int64_t row) const {
    return call.inputs + call.spans.slots[sequence] * call.slot_stride + row * call.channels +
           channel;
  }

  void run(std::int64_t sequence) {
    const std::int64_t before = call.taps - 1;
    const bool kept = call.inputs != nullptr && !call.spans.fresh[sequence];
    for (std::int64_t row = 0; row < before; ++row) {
      inputs[row] = kept ? _mm512_maskz_loadu_ps(mask, slot(sequence, row)) : _mm512_setzero_ps();
    }
    for (std::int64_t t = call.spans.starts[sequence]; t < call.spans.starts[sequence + 1]; ++t) {
      step(t, before);
    }
    for (std::int64_t row = 0; call.inputs != nullptr && row < before; ++row) {
      _mm512_mask_storeu_ps(slot(sequence, row), mask, inputs[row]);
    }
  }

  void step(std::int64_t t, std::int64_t before) {
    inputs[before] = _mm512_maskz_loadu_ps(mask, call.x + t * call.channels + channel);
    __m512 sum = _mm512_mul_ps(inputs[0], weights[0]);
    for (std::int64_t tap = 1; tap <= before; ++tap) {
      sum = _mm512_fmadd_ps(inputs[tap], weights[tap], sum);
    }
    _mm512_mask_storeu_ps(call.out + t * call.channels + channel, mask, silu_512(sum));
    for (std::int64_t tap = 0; tap < before; ++tap) inputs[tap] = inputs[tap + 1];
  }
};

}  // namespace

void short_conv(const ConvolutionCall& call) {
  const std::int64_t parts = (call.channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
  const std::int64_t tokens = call.spans.starts[call.spans.sequences];
  const bool small = tokens * call.channels < (16 << 10);
  each_piece(small ? 1 : call.threads, parts * call.spans.sequences, 1,
             [&](std::int64_t piece, std::int64_t) {
               const std::int64_t sequence = piece / parts, first = piece % parts * kChannelsAtOnce;
               if (call.spans.starts[sequence] == call.spans.starts[sequence + 1]) return;
               const std::int64_t end = std::min(call.channels, first + kChannelsAtOnce);
               for (std::int64_t c = first; c < end; c += 16) Window(call, c).run(sequence);
             });
}

}  // namespace firstlight
