// Owns the call record of routed MXFP4 experts and how a call is cut into jobs.
// It refuses to know how a job is computed: two sets of kernels, vectors and tiles, do.
#pragma once
#include <cstdint>
#include <vector>

#include "activation.hpp"

namespace firstlight {

constexpr std::int64_t kGroup = 32;  // columns that share a scale

// Matrices [experts, rows, columns]: two codes a byte, low half first, and one exponent for 32.
struct Mxfp4Matrices {
  const std::uint8_t *packed = nullptr, *scale = nullptr;
  std::int64_t experts = 0, rows = 0, columns = 0;

  std::int64_t row_bytes() const { return columns / 2; }
  std::int64_t scale_bytes() const { return columns / kGroup; }
  const std::uint8_t* packed_row(std::int64_t expert, std::int64_t row) const {
    return packed + (expert * rows + row) * row_bytes();
  }
  const std::uint8_t* scale_row(std::int64_t expert, std::int64_t row) const {
    return scale + (expert * rows + row) * scale_bytes();
  }
};

// out = sum over a token's chosen experts at hand of share * w2 act(w1 x, w3 x), added to `total` if
// there is one. Experts are summed in the order of their numbers, wherever their matrices stand.
struct ExpertsCall {
  const float* x = nullptr;           // [tokens, inputs]
  const std::int64_t* ids = nullptr;  // [tokens, chosen], numbers of all experts
  const float* shares = nullptr;      // [tokens, chosen]
  std::int64_t tokens = 0, chosen = 0;
  Mxfp4Matrices w1, w3, w2;           // [inner, inputs] twice, [inputs, inner]
  std::int64_t first = 0;             // number of the first expert at hand
  std::int64_t experts = 0;           // how many follow it
  const std::int64_t* slots = nullptr;  // [experts] where in w1 ... each stands, < 0: nowhere
  const float* total = nullptr;       // [tokens, inputs]
  GatedActivation activation;
  float* out = nullptr;               // [tokens, inputs]
  bool tiles = false;
  int threads = 1;

  // Where the matrices of an expert stand, by its number; negative for one that is not at hand.
  std::int64_t slot_of(std::int64_t expert) const {
    if (expert < first || expert >= first + experts) return -1;
    return slots == nullptr ? expert - first : slots[expert - first];
  }
  std::int64_t inputs() const { return w2.rows; }
  std::int64_t inner() const { return w1.rows; }
};

// Some tokens of one expert, and where their inputs and inner activations are prepared.
struct ExpertJob {
  std::int64_t expert = 0, count = 0;  // the expert by where it stands
  const std::int64_t* tokens = nullptr;
  const float* shares = nullptr;
  bool tiled = false;
  std::uint8_t *x = nullptr, *inner = nullptr;
};

// One way to compute a job. Rows are rows of w1 and w3, or of w2.
struct ExpertKernels {
  std::int64_t (*prepared_bytes)(std::int64_t count, std::int64_t width);
  void (*prepare)(const ExpertsCall& call, const ExpertJob& job);
  void (*inner)(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows);
  void (*outer)(const ExpertsCall& call, const ExpertJob& job, std::int64_t row, std::int64_t rows);
};

extern const ExpertKernels kVectorExperts, kTileExperts;

void experts_mxfp4(const ExpertsCall& call);

}  // namespace firstlight
