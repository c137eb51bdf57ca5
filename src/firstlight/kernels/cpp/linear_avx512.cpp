// Owns linear maps of few rows with AVX-512 multiply-adds: the weights stream once.
// It refuses to know Python, torch and where the weights came from.
//
// Every output element has one vector of 16 partial sums, filled in channel order and summed at the
// end, whatever the number of rows: a row's result doesn't depend on the other rows.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "linear.hpp"
#include "threads.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kRowsAtOnce = 8;
constexpr std::int64_t kChunkBytes = 96 << 10;  // of weight claimed by a thread at a time

struct Rows {
  const float* x;
  std::int64_t stride, inputs;
};

// dots[i * kRows + j] = weight row i times x row j.
template <int kOutputs, int kRows>
void dot_block(const float* const (&weights)[kOutputs], const Rows& rows, float* dots) {
  __m512 sums[kOutputs][kRows];
  for (auto& line : sums) {
    for (__m512& sum : line) sum = _mm512_setzero_ps();
  }
  const auto add = [&](std::int64_t channel, __mmask16 mask) {
    __m512 w[kOutputs];
    // The rows after these: the hardware prefetcher stops at each page.
    for (int i = 0; i < kOutputs; ++i) {
      const float* ahead = weights[i] + kOutputs * rows.inputs + channel;
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
    }
    for (int i = 0; i < kOutputs; ++i) w[i] = _mm512_maskz_loadu_ps(mask, weights[i] + channel);
    for (int j = 0; j < kRows; ++j) {
      const __m512 x = _mm512_maskz_loadu_ps(mask, rows.x + j * rows.stride + channel);
      for (int i = 0; i < kOutputs; ++i) sums[i][j] = _mm512_fmadd_ps(w[i], x, sums[i][j]);
    }
  };
  std::int64_t channel = 0;
  for (; channel + 16 <= rows.inputs; channel += 16) add(channel, 0xffff);
  if (channel < rows.inputs) {
    add(channel, static_cast<__mmask16>((1u << (rows.inputs - channel)) - 1));
  }
  for (int i = 0; i < kOutputs; ++i) {
    for (int j = 0; j < kRows; ++j) dots[i * kRows + j] = _mm512_reduce_add_ps(sums[i][j]);
  }
}

// One segment (or gate and up) for outputs [begin, end) and kRows rows of x from `row`.
template <int kRows>
void run_rows(const LinearCall& call, int index, std::int64_t row, std::int64_t begin,
              std::int64_t end) {
  constexpr int kOutputs = kRows <= 4 ? 4 : 2;
  const LinearSegment& segment = call.segments[index];
  const LinearSegment& up = call.segments[call.gated ? 1 : index];
  const Rows rows{call.x + row * call.x_stride, call.x_stride, call.inputs};
  constexpr int kGated = kOutputs / 2;
  const int step = call.gated ? kGated : kOutputs;
  for (std::int64_t output = begin; output < end; output += step) {
    const float* weights[kOutputs];
    for (int i = 0; i < kOutputs; ++i) {
      const std::int64_t at = std::min(output + (call.gated ? i % kGated : i), end - 1);
      weights[i] = (call.gated && i >= kGated ? up : segment).weight + at * call.inputs;
    }
    alignas(64) float dots[kOutputs * kRows];
    dot_block<kOutputs, kRows>(weights, rows, dots);
    for (int i = 0; i < step && output + i < end; ++i) {
      const std::int64_t at = output + i;
      for (int j = 0; j < kRows; ++j) {
        float value = dots[i * kRows + j] + (segment.bias ? segment.bias[at] : 0.0f);
        if (call.gated) {
          const float right = dots[(i + kGated) * kRows + j] + (up.bias ? up.bias[at] : 0.0f);
          value = _mm512_cvtss_f32(silu_512(_mm512_set1_ps(value))) * right;
        }
        const std::int64_t target = (row + j) * segment.outputs + at;
        segment.out[target] = segment.residual ? value + segment.residual[target] : value;
      }
    }
  }
}

void run_outputs(const LinearCall& call, int index, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    switch (std::min(kRowsAtOnce, call.rows - row)) {
      case 1: run_rows<1>(call, index, row, begin, end); break;
      case 2: run_rows<2>(call, index, row, begin, end); break;
      case 3: run_rows<3>(call, index, row, begin, end); break;
      case 4: run_rows<4>(call, index, row, begin, end); break;
      case 5: run_rows<5>(call, index, row, begin, end); break;
      case 6: run_rows<6>(call, index, row, begin, end); break;
      case 7: run_rows<7>(call, index, row, begin, end); break;
      default: run_rows<8>(call, index, row, begin, end);
    }
  }
}

}  // namespace

void linear_avx512(const LinearCall& call) {
  const int count = call.gated ? 1 : call.count;
  std::int64_t bytes = 0;
  for (int i = 0; i < call.count; ++i) bytes += call.segments[i].outputs * call.inputs * 4;
  const std::int64_t row_bytes = std::max<std::int64_t>(1, call.inputs * (call.gated ? 8 : 4));
  // Small weights: as many chunks for each thread as for the others.
  const std::int64_t even = bytes / (4 * call.threads) + 1;
  const std::int64_t chunk = std::max<std::int64_t>(
      4, (std::min(kChunkBytes, even) + row_bytes - 1) / row_bytes / 4 * 4);
  std::atomic<std::int64_t> claimed{0};
  const int threads = bytes * call.rows < (64 << 10) ? 1 : call.threads;
  on_threads(threads, [&](int, int) {
    std::int64_t first_chunk = 0;
    std::int64_t mine = claimed.fetch_add(1);
    for (int index = 0; index < count; ++index) {
      const std::int64_t outputs = call.segments[index].outputs;
      const std::int64_t chunks = (outputs + chunk - 1) / chunk;
      for (; mine < first_chunk + chunks; mine = claimed.fetch_add(1)) {
        const std::int64_t begin = (mine - first_chunk) * chunk;
        run_outputs(call, index, begin, std::min(outputs, begin + chunk));
      }
      first_chunk += chunks;
    }
  });
}

}  // namespace firstlight
