// Owns how an attention call is cut into tasks for threads.
// It refuses to know how a task is computed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "attention_state.hpp"

namespace firstlight {

constexpr std::int64_t kChunkKeys = 1024;
constexpr std::int64_t kTaskColumns = 192;

constexpr std::int64_t kAllChunks = -1;

// Some query columns of one sequence and one key/value head.
struct Task {
  std::int64_t sequence, kv_head;
  std::int64_t first_token, tokens;  // within the sequence's tokens of this step
  std::int64_t chunk;                // or kAllChunks
  std::int64_t partial;              // index of its partial result, when chunk is set
};

// Tasks of a call, and for those cut into chunks, the ranges of partial results to merge.
struct Schedule {
  struct Merge {
    Task task;
    std::int64_t chunks;
  };
  std::vector<Task> tasks;
  std::vector<Merge> merges;
  std::int64_t partial_floats = 0;

  explicit Schedule(const AttentionCall& call) {
    const Shape shape(call);
    const std::int64_t tokens_at_once = std::max<std::int64_t>(1, kTaskColumns / shape.group);
    for (std::int64_t b = 0; b < call.sequences; ++b) {
      const std::int64_t length = call.starts[b + 1] - call.starts[b];
      if (call.carry != nullptr && call.last(b) <= call.first(b)) continue;
      const std::int64_t first_chunk = call.first(b) / kChunkKeys;
      const std::int64_t chunks = (call.last(b) + kChunkKeys - 1) / kChunkKeys - first_chunk;
      // Few query columns, or a single head of keys: too few tasks otherwise.
      const std::int64_t columns = length * shape.group;
      const std::int64_t most = call.kv_heads == 1 ? kTaskColumns : 16;
      const bool cut = length > 0 && columns <= most && chunks > 1;
      const std::int64_t state_floats = (columns + 15) / 16 * shape.state();
      for (std::int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
        if (cut) {
          merges.push_back({{b, kv_head, 0, length, 0, partial_floats}, chunks});
          for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
            tasks.push_back({b, kv_head, 0, length, first_chunk + chunk, partial_floats});
            partial_floats += state_floats;
          }
        } else {
          for (std::int64_t t = 0; t < length; t += tokens_at_once) {
            tasks.push_back({b, kv_head, t, std::min(tokens_at_once, length - t), kAllChunks, 0});
          }
        }
      }
    }
    // The longest last parts of prompts first, so that threads end together.
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
      return a.first_token + a.tokens > b.first_token + b.tokens;
    });
  }
};

}  // namespace firstlight
