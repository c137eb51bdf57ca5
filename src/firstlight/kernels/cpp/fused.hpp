// Owns the call records of whole modules: the feed-forward and attention with its projections.
#pragma once
#include "attention.hpp"
#include "linear.hpp"

namespace firstlight {

// Up to here the weights' bytes set the speed and vectors do the work, beyond it tiles do.
constexpr std::int64_t kVectorRows = 8;

void linear_any(const LinearCall& call);

// `down` reads what `gated` writes.
struct MlpCall {
  LinearCall gated, down;
};

void packed_mlp(const MlpCall& call);

// Attention reads the rows `project` writes (queries, keys, values), `output` what attention writes.
struct AttentionModuleCall {
  LinearCall project, output;
  AttentionCall attention;
  float *q = nullptr, *k = nullptr;  // of `project`, for the norms
  const float *q_norm = nullptr, *k_norm = nullptr;  // [channels], or null
  float epsilon = 0.0f;
};

void packed_attention(const AttentionModuleCall& call);

}  // namespace firstlight
