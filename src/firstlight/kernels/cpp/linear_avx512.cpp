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
constexpr std::int64_t kAheadBytes = 4096;      // of packed weight fetched before its use

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
  const std::int64_t row_bytes = row_bytes_of(kFormat, rows.inputs);
  const std::int64_t ahead = (kAheadBytes + row_bytes - 1) / row_bytes * row_bytes;
  const std::int64_t blocks = rows.inputs / kBlock;
  for (int i = 0; i < kOutputs; ++i) readers[i].open(weights[i], rows.inputs);
  for (std::int64_t first = 0; first < blocks; first += kBlocksAtOnce) {
    const std::int64_t count = std::min(kBlocksAtOnce, blocks - first);
    for (RowReader<kFormat>& reader : readers) {
      const char* scales = reinterpret_cast<const char*>(reader.row) + ahead + 2 * first;
      _mm_prefetch(scales, _MM_HINT_T0);
      _mm_prefetch(scales + 64, _MM_HINT_T0);
      reader.start(first, count);
    }
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

template <int kRows>
constexpr int kOutputsAtOnce = kRows <= 4 ? 4 : 2;

// One segment for outputs [begin, end) and kRows rows of x from `row`.
template <int kRows>
void run_rows(const LinearCall& call, int index, std::int64_t row, std::int64_t begin,
              std::int64_t end) {
  constexpr int kOutputs = kOutputsAtOnce<kRows>;
  const LinearSegment& segment = call.segments[index];
  const Rows rows{call.x + row * call.x_stride, call.x_stride, call.inputs};
  for (std::int64_t output = begin; output < end; output += kOutputs) {
    alignas(64) float dots[kOutputs * kRows];
    dots_of<kOutputs, kRows>(segment.weight, output, end, rows, dots);
    for (int i = 0; i < kOutputs && output + i < end; ++i) {
      const std::int64_t at = output + i;
      for (int j = 0; j < kRows; ++j) {
        const float value = dots[i * kRows + j] + (segment.bias ? segment.bias[at] : 0.0f);
        const std::int64_t target = (row + j) * segment.outputs + at;
        segment.out[target] = segment.residual ? value + segment.residual[target] : value;
      }
    }
  }
}

// A row's sums of 16 outputs, the bias added.
template <int kRows>
void sums_of_16(const LinearSegment& segment, std::int64_t output, std::int64_t end,
                const Rows& rows, __m512 (&sums)[kRows]) {
  constexpr int kOutputs = kOutputsAtOnce<kRows>;
  alignas(64) float lines[kRows][16] = {};
  for (int first = 0; first < 16 && output + first < end; first += kOutputs) {
    alignas(64) float dots[kOutputs * kRows];
    dots_of<kOutputs, kRows>(segment.weight, output + first, end, rows, dots);
    for (int i = 0; i < kOutputs; ++i) {
      for (int j = 0; j < kRows; ++j) lines[j][first + i] = dots[i * kRows + j];
    }
  }
  const auto mask = static_cast<__mmask16>((1u << std::min<std::int64_t>(16, end - output)) - 1);
  const __m512 bias = segment.bias ? _mm512_maskz_loadu_ps(mask, segment.bias + output)
                                   : _mm512_setzero_ps();
  for (int j = 0; j < kRows; ++j) sums[j] = _mm512_add_ps(_mm512_load_ps(lines[j]), bias);
}

// Gate and up for outputs [begin, end) and kRows rows of x from `row`.
template <int kRows>
void run_gated(const LinearCall& call, std::int64_t row, std::int64_t begin, std::int64_t end) {
  const LinearSegment &gate = call.segments[0], &up = call.segments[1];
  const Rows rows{call.x + row * call.x_stride, call.x_stride, call.inputs};
  for (std::int64_t output = begin; output < end; output += 16) {
    __m512 gates[kRows], ups[kRows];
    sums_of_16<kRows>(gate, output, end, rows, gates);
    sums_of_16<kRows>(up, output, end, rows, ups);
    const auto mask = static_cast<__mmask16>((1u << std::min<std::int64_t>(16, end - output)) - 1);
    for (int j = 0; j < kRows; ++j) {
      float* target = gate.out + (row + j) * gate.outputs + output;
      _mm512_mask_storeu_ps(target, mask, _mm512_mul_ps(silu_512(gates[j]), ups[j]));
    }
  }
}

template <int kRows>
void run_some(const LinearCall& call, int index, std::int64_t row, std::int64_t begin,
              std::int64_t end) {
  if (call.gated) {
    run_gated<kRows>(call, row, begin, end);
  } else {
    run_rows<kRows>(call, index, row, begin, end);
  }
}

void run_outputs(const LinearCall& call, int index, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    switch (std::min(kRowsAtOnce, call.rows - row)) {
      case 1: run_some<1>(call, index, row, begin, end); break;
      case 2: run_some<2>(call, index, row, begin, end); break;
      case 3: run_some<3>(call, index, row, begin, end); break;
      case 4: run_some<4>(call, index, row, begin, end); break;
      case 5: run_some<5>(call, index, row, begin, end); break;
      case 6: run_some<6>(call, index, row, begin, end); break;
      case 7: run_some<7>(call, index, row, begin, end); break;
      default: run_some<8>(call, index, row, begin, end);
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
      16, (std::min(kChunkBytes, even) + row_bytes - 1) / row_bytes / 16 * 16);
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
