// Owns the call record of attention over earlier residual sums.
#pragma once
#include <cstdint>

namespace firstlight {

// Per token, over rows v of the bank and the current one: sum softmax(<v / rms(v), query>) v.
struct ResidualMixCall {
  const float* bank = nullptr;  // [tokens, rows, width], rows of numbers dense
  std::int64_t token_stride = 0, row_stride = 0;
  const float* current = nullptr;  // [tokens, width]
  const float* query = nullptr;    // [width]
  std::int64_t tokens = 0, rows = 0, width = 0;
  float epsilon = 0.0f;
  float* out = nullptr;  // [tokens, width]
  int threads = 1;
};

constexpr std::int64_t kMostMixedRows = 64;

void residual_mix(const ResidualMixCall& call);

}  // namespace firstlight
