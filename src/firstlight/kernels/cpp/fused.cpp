// Owns whole modules in one call: with few rows one parallel region whose phases follow each other
// without going back to Python; with more rows each part has regions of its own.
// It refuses to know Python and torch. Results are those of the single operations, bit for bit.
#include "fused.hpp"

#include "norms.hpp"
#include "threads.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kTokensAtOnce = 32;

void normalise(const AttentionModuleCall& call, std::int64_t begin, std::int64_t end) {
  const AttentionCall& attention = call.attention;
  const auto heads = [&](float* rows, const float* weight, std::int64_t count) {
    if (weight == nullptr) return;
    NormCall norm;
    norm.x = norm.normed = rows + begin * count * attention.channels;
    norm.weight = weight;
    norm.rows = (end - begin) * count;
    norm.width = attention.channels;
    norm.epsilon = call.epsilon;
    rms_norm(norm);
  };
  heads(call.q, call.q_norm, attention.heads);
  heads(call.k, call.k_norm, attention.kv_heads);
}

void attention_on_tiles(const AttentionModuleCall& call) {
  linear_amx(call.project);
  if (call.q_norm || call.k_norm) {
    each_piece(call.attention.threads, call.attention.tokens, kTokensAtOnce,
               [&](std::int64_t begin, std::int64_t end) { normalise(call, begin, end); });
  }
  attention_amx(call.attention);
  linear_amx(call.output);
}

}  // namespace

void linear_any(const LinearCall& call) {
  if (call.rows > kVectorRows) {
    linear_amx(call);
  } else {
    linear_avx512(call);
  }
}

void packed_mlp(const MlpCall& call) {
  if (call.gated.rows > kVectorRows) {
    linear_amx(call.gated);
    linear_amx(call.down);
    return;
  }
  const VectorTasks gated(call.gated), down(call.down);
  Phase phases[2];
  on_threads(call.gated.threads, [&](int, int) {
    phases[0].run(gated.count(), [&](std::int64_t task) { gated.run(task); });
    phases[1].run(down.count(), [&](std::int64_t task) { down.run(task); });
  });
}

void packed_attention(const AttentionModuleCall& call) {
  const AttentionCall& attention = call.attention;
  if (attention.tokens == 0) return;
  if (attention.tokens > kVectorRows) return attention_on_tiles(call);
  const VectorTasks project(call.project), output(call.output);
  const AttentionTasks attend(attention);
  Phase phases[5];
  on_threads(attention.threads, [&](int, int) {
    phases[0].run(project.count(), [&](std::int64_t task) { project.run(task); });
    phases[1].run(attention.tokens, [&](std::int64_t token) {
      normalise(call, token, token + 1);
      attend.store(token, token + 1);
    });
    phases[2].run(attend.tasks(), [&](std::int64_t task) { attend.attend(task); });
    phases[3].run(attend.merges(), [&](std::int64_t index) { attend.merge(index); });
    phases[4].run(output.count(), [&](std::int64_t task) { output.run(task); });
  });
}

}  // namespace firstlight
