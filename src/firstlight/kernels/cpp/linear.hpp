// Owns the call records of the linear operations; both instruction sets implement them.
#pragma once
#include <cstdint>

#include "weight.hpp"

namespace firstlight {

// One weight [outputs, inputs] and where its result goes.
struct LinearSegment {
  Weight weight;
  const float* bias = nullptr;      // or null
  const float* residual = nullptr;  // [rows, outputs], or null
  float* out = nullptr;             // [rows, outputs]
  std::int64_t outputs = 0;
};

// out = x W^T + bias + residual for each segment. When gated, segments 0 and 1 are gate and up of
// equal size and segment 0's out receives silu(gate) * up.
struct LinearCall {
  const float* x = nullptr;  // [rows, inputs]
  std::int64_t x_stride = 0;
  std::int64_t rows = 0;
  std::int64_t inputs = 0;
  const LinearSegment* segments = nullptr;
  int count = 0;
  bool gated = false;
  int threads = 1;
};

void linear_amx(const LinearCall& call);
void linear_avx512(const LinearCall& call);

// The same work as linear_avx512 in pieces that may run in any order, on any thread.
class VectorTasks {
 public:
  explicit VectorTasks(const LinearCall& call);
  std::int64_t count() const { return count_; }
  void run(std::int64_t task) const;

 private:
  const LinearCall& call_;
  std::int64_t chunk_, count_;  // outputs of a task; tasks
};

}  // namespace firstlight
