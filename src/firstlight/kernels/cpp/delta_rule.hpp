// Owns the call records of the gated delta rule and of the short convolution before it.
#pragma once
#include <cstdint>

namespace firstlight {

// Sequences of a packed batch: b owns tokens [starts[b], starts[b + 1]). Without slots every
// sequence starts from zeros and leaves nothing.
struct Spans {
  const std::int64_t* starts = nullptr;  // [sequences + 1]
  const std::int64_t* slots = nullptr;   // [sequences], or null
  const bool* fresh = nullptr;           // [sequences]: starts from zeros all the same
  std::int64_t sequences = 0;
};

// Per head, with state S [keys, values]: S <- diag(exp decay) S; e = beta (v - S^T k);
// S <- S + k e^T; o = S^T q. Rows of heads and channels are dense, tokens may be further apart.
struct DeltaCall {
  const float *q = nullptr, *k = nullptr, *v = nullptr, *decay = nullptr, *beta = nullptr;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, decay_stride = 0, beta_stride = 0;
  std::int64_t heads = 0, keys = 0, values = 0;
  Spans spans;
  float* matrices = nullptr;  // [slots, heads, keys, values], dense but for slots
  std::int64_t slot_stride = 0;
  float* out = nullptr;       // [tokens, heads, values]
  int threads = 1;
};

// One head of one sequence.
struct DeltaHead {
  const float *q, *k, *v, *decay, *beta;
  float *out, *state;  // state [keys, values]
  std::int64_t tokens;
};

void delta_rule(const DeltaCall& call);

// Both read and write `state`; the same result but for rounding.
void recurrent_delta_rule(const DeltaCall& call, const DeltaHead& head);
void chunked_delta_rule(const DeltaCall& call, const DeltaHead& head);

// y[t, c] = SiLU(sum_j weight[c, j] x[t - taps + 1 + j, c]); a slot keeps the last taps - 1 inputs.
struct ConvolutionCall {
  const float* x = nullptr;       // [tokens, channels]
  const float* weight = nullptr;  // [channels, taps]
  std::int64_t channels = 0, taps = 0;
  Spans spans;
  float* inputs = nullptr;        // [slots, taps - 1, channels], dense but for slots
  std::int64_t slot_stride = 0;
  float* out = nullptr;           // [tokens, channels]
  int threads = 1;
};

constexpr std::int64_t kMostTaps = 8;

void short_conv(const ConvolutionCall& call);

}  // namespace firstlight
