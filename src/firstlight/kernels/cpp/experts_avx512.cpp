// Owns MXFP4 experts for few tokens with AVX-512: codes are decoded in registers and stream once.
// It refuses to know Python, torch and which tokens chose an expert.
//
// 64 bytes of a row hold 128 channels: dword i has those from 8 i on, four bits each. Prepared rows
// therefore stand in groups of 128, channel 8 i + k at 16 k + i, with zeros after the last channel.
// A group's products are summed unscaled, lane by lane, and then multiplied by the lane's scale.
#include <immintrin.h>

#include <algorithm>

#include "experts.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kWide = 128;        // channels of 64 bytes
constexpr std::int64_t kScalesAtOnce = 16;
constexpr int kOutputsAtOnce = 4;

std::int64_t padded(std::int64_t width) { return (width + kWide - 1) / kWide * kWide; }

std::int64_t prepared_place(std::int64_t channel) {
  return channel / kWide * kWide + channel % 8 * 16 + channel % kWide / 8;
}

std::int64_t prepared_bytes(std::int64_t count, std::int64_t width) {
  return count * padded(width) * 4;
}

void prepare(const ExpertsCall& call, const ExpertJob& job) {
  const std::int64_t width = call.inputs();
  auto* target = reinterpret_cast<float*>(job.x);
  for (std::int64_t i = 0; i < job.count; ++i, target += padded(width)) {
    const float* source = call.x + job.tokens[i] * width;
    std::fill(target, target + padded(width), 0.0f);
    for (std::int64_t channel = 0; channel < width; ++channel) {
      target[prepared_place(channel)] = source[channel];
    }
  }
  auto* inner = reinterpret_cast<float*>(job.inner);
  std::fill(inner, inner + job.count * padded(call.inner()), 0.0f);
}

inline __m512 magnitudes() {
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

// 2^(s - 127) of up to 16 exponents; 2^-127 has its only bit below the exponent's.
inline __m512 widen_scales(const std::uint8_t* source, std::int64_t count) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, source));
  const __m512i shifted = _mm512_slli_epi32(exponents, 23);
  return _mm512_castsi512_ps(_mm512_max_epi32(shifted, _mm512_set1_epi32(1 << 22)));
}

// Lane i of group `part` has the scale of channels 8 i .. 8 i + 7: the one of number 4 part + i / 4.
inline __m512i scale_lanes(int part) {
  return _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                          _mm512_set1_epi32(4 * part));
}

template <int kShift, int kRows>
inline void add_products(__m512i codes, const float* x, std::int64_t stride,
                         __m512 (&sums)[kRows]) {
  const __m512i moved = kShift ? _mm512_srli_epi32(codes, 4 * kShift) : codes;
  const __m512 values = _mm512_permutexvar_ps(moved, magnitudes());
  for (int j = 0; j < kRows; ++j) {
    const __m512 at = _mm512_loadu_ps(x + j * stride + 16 * kShift);
    sums[j] = kShift ? _mm512_fmadd_ps(values, at, sums[j]) : _mm512_mul_ps(values, at);
  }
}

template <int kRows>
inline void add_group(__m512i codes, __m512 scale, const float* x, std::int64_t stride,
                      __m512 (&totals)[kRows]) {
  __m512 sums[kRows];
  add_products<0>(codes, x, stride, sums);
  add_products<1>(codes, x, stride, sums);
  add_products<2>(codes, x, stride, sums);
  add_products<3>(codes, x, stride, sums);
  add_products<4>(codes, x, stride, sums);
  add_products<5>(codes, x, stride, sums);
  add_products<6>(codes, x, stride, sums);
  add_products<7>(codes, x, stride, sums);
  for (int j = 0; j < kRows; ++j) totals[j] = _mm512_fmadd_ps(sums[j], scale, totals[j]);
}

// dots[i * kRows + j] = row `row + i` of an expert's matrix times prepared row j.
template <int kRows>
void dots_of(const Mxfp4Matrices& matrix, std::int64_t expert, std::int64_t row, const float* x,
             float* dots) {
  const std::int64_t stride = padded(matrix.columns), row_bytes = matrix.row_bytes();
  const std::uint8_t* packed = matrix.packed_row(expert, row);
  const std::uint8_t* scale = matrix.scale_row(expert, row);
  __m512 totals[kOutputsAtOnce][kRows];
  for (auto& line : totals) std::fill(line, line + kRows, _mm512_setzero_ps());
  for (std::int64_t group = 0; group < matrix.scale_bytes(); group += kScalesAtOnce) {
    const std::int64_t left = std::min(kScalesAtOnce, matrix.scale_bytes() - group);
    __m512 scales[kOutputsAtOnce];
    for (int i = 0; i < kOutputsAtOnce; ++i) {
      const std::uint8_t* at = scale + i * matrix.scale_bytes() + group;
      const std::uint8_t* next = at + kOutputsAtOnce * matrix.scale_bytes();
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
      scales[i] = widen_scales(at, left);
    }
    for (int part = 0; 4 * part < left; ++part) {
      const std::int64_t groups = std::min<std::int64_t>(4, left - 4 * part);
      const auto mask = static_cast<__mmask16>((1u << 4 * groups) - 1);
      const std::int64_t channel = (group + 4 * part) * kGroup;
      const __m512i lanes = scale_lanes(part);
      for (int i = 0; i < kOutputsAtOnce; ++i) {
        const std::uint8_t* at = packed + i * row_bytes + channel / 2;
        // The rows after these: the hardware prefetcher stops at each page.
        _mm_prefetch(reinterpret_cast<const char*>(at + kOutputsAtOnce * row_bytes), _MM_HINT_T0);
        add_group<kRows>(_mm512_maskz_loadu_epi32(mask, at),
                         _mm512_permutexvar_ps(lanes, scales[i]), x + channel, stride, totals[i]);
      }
    }
  }
  for (int i = 0; i < kOutputsAtOnce; ++i) {
    for (int j = 0; j < kRows; ++j) dots[i * kRows + j] = _mm512_reduce_add_ps(totals[i][j]);
  }
}

// Sums of 16 rows of a matrix, a vector for each prepared row.
template <int kRows>
void sums_of_16(const Mxfp4Matrices& matrix, std::int64_t expert, std::int64_t row, const float* x,
                __m512 (&sums)[kRows]) {
  alignas(64) float lines[kRows][16];
  for (int first = 0; first < 16; first += kOutputsAtOnce) {
    float dots[kOutputsAtOnce * kRows];
    dots_of<kRows>(matrix, expert, row + first, x, dots);
    for (int i = 0; i < kOutputsAtOnce; ++i) {
      for (int j = 0; j < kRows; ++j) lines[j][first + i] = dots[i * kRows + j];
    }
  }
  for (int j = 0; j < kRows; ++j) sums[j] = _mm512_load_ps(lines[j]);
}

template <int kRows>
void inner_rows(const ExpertsCall& call, const ExpertJob& job, std::int64_t index,
                std::int64_t row) {
  const float* x = reinterpret_cast<const float*>(job.x) + index * padded(call.inputs());
  __m512 gates[kRows], ups[kRows];
  sums_of_16<kRows>(call.w1, job.expert, row, x, gates);
  sums_of_16<kRows>(call.w3, job.expert, row, x, ups);
  float* inner = reinterpret_cast<float*>(job.inner) + index * padded(call.inner());
  for (int j = 0; j < kRows; ++j, inner += padded(call.inner())) {
    alignas(64) float values[16];
    _mm512_store_ps(values, activate_512(gates[j], ups[j], call.activation));
    for (int i = 0; i < 16; ++i) inner[prepared_place(row + i)] = values[i];
  }
}

template <int kRows>
void outer_rows(const ExpertsCall& call, const ExpertJob& job, std::int64_t index,
                std::int64_t row) {
  const float* inner = reinterpret_cast<const float*>(job.inner) + index * padded(call.inner());
  __m512 sums[kRows];
  sums_of_16<kRows>(call.w2, job.expert, row, inner, sums);
  for (int j = 0; j < kRows; ++j) {
    float* target = call.out + job.tokens[index + j] * call.inputs() + row;
    const __m512 share = _mm512_set1_ps(job.shares[index + j]);
    _mm512_storeu_ps(target, _mm512_fmadd_ps(share, sums[j], _mm512_loadu_ps(target)));
  }
}

using SomeRows = void (*)(const ExpertsCall&, const ExpertJob&, std::int64_t, std::int64_t);

// Rows are multiples of 16: inputs and inner are whole groups.
void each_16(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows,
             const SomeRows (&kernels)[4]) {
  for (std::int64_t at = row; at < row + rows; at += 16) {
    for (std::int64_t index = 0; index < job.count; index += 4) {
      kernels[std::min<std::int64_t>(4, job.count - index) - 1](call, job, index, at);
    }
  }
}

void inner(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows) {
  each_16(call, job, row, rows, {inner_rows<1>, inner_rows<2>, inner_rows<3>, inner_rows<4>});
}

void outer(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows) {
  each_16(call, job, row, rows, {outer_rows<1>, outer_rows<2>, outer_rows<3>, outer_rows<4>});
}

}  // namespace

const ExpertKernels kVectorExperts{prepared_bytes, prepare, inner, outer};

}  // namespace firstlight
