// Owns the call records of the row operations: norms and greedy choice.
#pragma once
#include <cstdint>

namespace firstlight {

struct NormCall {
  const float* x = nullptr;         // [rows, width]
  const float* residual = nullptr;  // [rows, width], or null
  const float* weight = nullptr;    // [width]
  std::int64_t rows = 0, width = 0;
  float epsilon = 0.0f;
  float* normed = nullptr;
  float* sum = nullptr;  // x + residual; null without residual
  int threads = 1;
};

void rms_norm(const NormCall& call);

struct GreedyCall {
  const float* logits = nullptr;  // [rows, width]
  std::int64_t rows = 0, width = 0;
  std::int64_t* ids = nullptr;
  float* log_probabilities = nullptr;
  int threads = 1;
};

void greedy(const GreedyCall& call);

}  // namespace firstlight
