// Owns linear maps of few rows with AVX-512 multiply-adds: the weights stream once.
// It refuses to know Python, torch and where the weights came from.
//
// Every output element has one vector of 16 partial sums, filled in channel order and summed at the
// end, whatever the number of rows and the format of the weight: a row's result depends neither on
// the other rows nor on packing.
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

template <int kOutputs>
using Pointers = const std::uint8_t* [kOutputs];

template <int kOutputs, int kRows>
struct Sums {
  __m512 at[kOutputs][kRows];
  Sums() {
    for (auto& line : at) {
      for (__m512& sum : line) sum = _mm512_setzero_ps();
    }
  }
  void add(const __m512 (&w)[kOutputs], const Rows& rows, std::int64_t channel,
           __mmask16 mask = 0xffff) {
    for (int j = 0; j < kRows; ++j) {
      const __m512 x = _mm512_maskz_loadu_ps(mask, rows.x + j * rows.stride + channel);
      for (int i = 0; i < kOutputs; ++i) at[i][j] = _mm512_fmadd_ps(w[i], x, at[i][j]);
    }
  }
  void store(float* dots) const {
    for (int i = 0; i < kOutputs; ++i) {
      for (int j = 0; j < kRows; ++j) dots[i * kRows + j] = _mm512_reduce_add_ps(at[i][j]);
    }
  }
};

// dots[i * kRows + j] = weight row i times x row j.
template <int kOutputs, int kRows>
void dot_dense(const Pointers<kOutputs>& weights, const Rows& rows, float* dots) {
  Sums<kOutputs, kRows> sums;
  const auto add = [&](std::int64_t channel, __mmask16 mask) {
    __m512 w[kOutputs];
    for (int i = 0; i < kOutputs; ++i) {
      const float* at = reinterpret_cast<const float*>(weights[i]) + channel;
      // The rows after these: the hardware prefetcher stops at each page.
      _mm_prefetch(reinterpret_cast<const char*>(at + kOutputs * rows.inputs), _MM_HINT_T0);
      w[i] = _mm512_maskz_loadu_ps(mask, at);
    }
    sums.add(w, rows, channel, mask);
  };
  std::int64_t channel = 0;
  for (; channel + 16 <= rows.inputs; channel += 16) add(channel, 0xffff);
  if (channel < rows.inputs) {
    add(channel, static_cast<__mmask16>((1u << (rows.inputs - channel)) - 1));
  }
  sums.store(dots);
}

template <WeightFormat kFormat, int kOutputs, int kRows>
void dot_packed(const Pointers<kOutputs>& weights, const Rows& rows, float* dots) {
  Sums<kOutputs, kRows> sums;
  RowReader<kFormat> readers[kOutputs];
  const std::int64_t ahead = kOutputs * row_bytes_of(kFormat, rows.inputs);
  const std::int64_t blocks = rows.inputs / kBlock;
  for (int i = 0; i < kOutputs; ++i) readers[i].open(weights[i], rows.inputs);
  for (std::int64_t first = 0; first < blocks; first += kBlocksAtOnce) {
    const std::int64_t count = std::min(kBlocksAtOnce, blocks - first);
    for (RowReader<kFormat>& reader : readers) reader.start(first, count);
    for (std::int64_t block = 0; block < count; ++block) {
      __m512 low[kOutputs], high[kOutputs];
      for (int i = 0; i < kOutputs; ++i) {
        const std::uint8_t* next = readers[i].quants + readers[i].kQuantBytes * block + ahead;
        _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
        readers[i].read(block, low[i], high[i]);
      }
      const std::int64_t channel = (first + block) * kBlock;
      sums.add(low, rows, channel);
      sums.add(high, rows, channel + 16);
    }
  }
  sums.store(dots);
}

// Dots of the weight's rows from `output` on; rows from `end` on repeat the last one.
template <int kOutputs, int kRows>
void dots_of(const Weight& weight, std::int64_t output, std::int64_t end, const Rows& rows,
             float* dots) {
  Pointers<kOutputs> rows_of;
  for (int i = 0; i < kOutputs; ++i) rows_of[i] = weight.row(std::min(output + i, end - 1));
  switch (weight.format) {
    case WeightFormat::affine4:
      return dot_packed<WeightFormat::affine4, kOutputs, kRows>(rows_of, rows, dots);
    case WeightFormat::scaled8:
      return dot_packed<WeightFormat::scaled8, kOutputs, kRows>(rows_of, rows, dots);
    case WeightFormat::bfloat16:
      return dot_packed<WeightFormat::bfloat16, kOutputs, kRows>(rows_of, rows, dots);
    default: return dot_dense<kOutputs, kRows>(rows_of, rows, dots);
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
  for (std::int64_t output = begin; output < end; output += kOutputs) {
    alignas(64) float dots[kOutputs * kRows], ups[kOutputs * kRows];
    dots_of<kOutputs, kRows>(segment.weight, output, end, rows, dots);
    if (call.gated) dots_of<kOutputs, kRows>(up.weight, output, end, rows, ups);
    for (int i = 0; i < kOutputs && output + i < end; ++i) {
      const std::int64_t at = output + i;
      for (int j = 0; j < kRows; ++j) {
        float value = dots[i * kRows + j] + (segment.bias ? segment.bias[at] : 0.0f);
        if (call.gated) {
          const float right = ups[i * kRows + j] + (up.bias ? up.bias[at] : 0.0f);
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

std::int64_t weight_bytes(const LinearCall& call) {
  std::int64_t bytes = 0;
  for (int i = 0; i < call.count; ++i) {
    bytes += call.segments[i].outputs * call.segments[i].weight.row_bytes;
  }
  return bytes;
}

}  // namespace

VectorTasks::VectorTasks(const LinearCall& call) : call_(call), count_(0) {
  std::int64_t outputs = 0;
  for (int i = 0; i < (call.gated ? 1 : call.count); ++i) outputs += call.segments[i].outputs;
  const std::int64_t bytes = weight_bytes(call);
  const std::int64_t row_bytes = std::max<std::int64_t>(1, bytes / std::max<std::int64_t>(1, outputs));
  // Small weights: as many chunks for each thread as for the others.
  const std::int64_t even = bytes / (4 * call.threads) + 1;
  chunk_ = std::max<std::int64_t>(
      4, (std::min(kChunkBytes, even) + row_bytes - 1) / row_bytes / 4 * 4);
  for (int i = 0; i < (call.gated ? 1 : call.count); ++i) {
    count_ += (call.segments[i].outputs + chunk_ - 1) / chunk_;
  }
}

void VectorTasks::run(std::int64_t task) const {
  int index = 0;
  const auto chunks = [&] { return (call_.segments[index].outputs + chunk_ - 1) / chunk_; };
  for (; task >= chunks(); ++index) task -= chunks();
  const std::int64_t begin = task * chunk_;
  run_outputs(call_, index, begin, std::min(call_.segments[index].outputs, begin + chunk_));
}

void linear_avx512(const LinearCall& call) {
  const VectorTasks tasks(call);
  const int threads = weight_bytes(call) * call.rows < (64 << 10) ? 1 : call.threads;
  each_piece(threads, tasks.count(), 1,
             [&](std::int64_t begin, std::int64_t) { tasks.run(begin); });
}

}  // namespace firstlight
