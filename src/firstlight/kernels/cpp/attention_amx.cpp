// Owns causal attention over a paged cache on AMX tiles, block by block with a running softmax.
// It refuses to know Python, torch and who filled the cache.
//
// Everything is transposed: keys are the left operand and 16 query columns (token, head of a group)
// the right one, so that scores are [key, column] and the softmax works on whole vectors; their
// rows, split again, are the right operand of V^T P^T. Blocks of 64 keys stand at multiples of 64
// and chunks of 1024 keys at multiples of 1024; chunks are summed apart and merged in order. A
// token's result therefore doesn't depend on batch, chunked prefill, or how work was cut.
#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "attention_blocks.hpp"
#include "attention_schedule.hpp"
#include "attention_state.hpp"
#include "quantise.hpp"
#include "threads.hpp"
#include "tiles.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kTokensAtOnce = 32;  // written to the pages by one thread

// One thread's scratch and the steps of one task; `Blocks` are cached rows of one type.
template <class Blocks>
class Worker {
 public:
  explicit Worker(const AttentionCall& call)
      : call_(call), shape_(call), q_(scratch(call, shape_)), blocks_(call, shape_, after(q_)) {
    const std::int64_t columns = kTaskColumns / 16, states = columns * shape_.state();
    scores_ = reinterpret_cast<float*>(after(q_) + Blocks::scratch_bytes(call, shape_));
    chunk_states_ = scores_ + kBlockKeys * 16;
    states_ = chunk_states_ + states;
    row_ = states_ + states;
  }

  // Attends; a task of one chunk leaves its state in `partial`, any other writes its output.
  void run(const Task& task, float* partial) {
    start(task);
    if (task.chunk != kAllChunks) {
      run_chunk(task.chunk, partial);
      return;
    }
    begin_states();
    const std::int64_t first = call_.sinks > 0 ? call_.first(task.sequence) : first_;
    for (std::int64_t chunk = first / kChunkKeys; chunk * kChunkKeys < last_; ++chunk) {
      if (chunk * kChunkKeys >= call_.sinks && (chunk + 1) * kChunkKeys <= first_) continue;
      run_chunk(chunk, chunk_states_);
      for (std::int64_t i = 0; i < column_tiles_; ++i) {
        merge_state(state(states_, i), state(chunk_states_, i), shape_);
      }
    }
    end_states();
  }

  // Merges the partial results of a task's chunks, in order, and writes its output.
  void finish(const Task& task, const float* partials, std::int64_t chunks) {
    start_columns(task);
    begin_states();
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (std::int64_t i = 0; i < column_tiles_; ++i) {
        float* from = const_cast<float*>(partials) +
                      (chunk * column_tiles_ + i) * shape_.state();
        merge_state(state(states_, i), State{from}, shape_);
      }
    }
    end_states();
  }

 private:
  static std::uint8_t* scratch(const AttentionCall& call, const Shape& shape) {
    const std::int64_t columns = kTaskColumns / 16;
    const std::int64_t floats = kBlockKeys * 16 + 2 * columns * shape.state() +
                                shape.steps * kStep * 16;
    return static_cast<std::uint8_t*>(thread_scratch(
        0, columns * shape.steps * kStepBytes + Blocks::scratch_bytes(call, shape) + floats * 4));
  }

  // Where the queries of a task end.
  std::uint8_t* after(std::uint8_t* q) const {
    return q + kTaskColumns / 16 * shape_.steps * kStepBytes;
  }

  State state(float* states, std::int64_t tile) const {
    return State{states + tile * shape_.state()};
  }

  void clear_states(float* states) const {
    for (std::int64_t i = 0; i < column_tiles_; ++i) state(states, i).clear(shape_);
  }

  void start_columns(const Task& task) {
    task_ = task;
    columns_ = task.tokens * shape_.group;
    column_tiles_ = (columns_ + 15) / 16;
    const std::int64_t begin = call_.starts[task.sequence], end = call_.starts[task.sequence + 1];
    first_row_ = begin + task.first_token;
    least_position_ = call_.contexts[task.sequence] - (end - begin) + task.first_token;
    const std::int64_t end_seen = least_position_ + task.tokens;
    first_ = std::max(call_.first(task.sequence), least_position_ - call_.window + 1);
    last_ = std::min(call_.last(task.sequence), end_seen);
  }

  std::int64_t head_of(std::int64_t column) const {
    return task_.kv_head * shape_.group + column % shape_.group;
  }

  // Rotates, scales, splits and packs the queries.
  void start(const Task& task) {
    start_columns(task);
    const std::int64_t width = shape_.steps * kStep;
    std::fill(row_, row_ + 16 * width, 0.0f);
    for (std::int64_t tile = 0; tile < column_tiles_; ++tile) {
      const std::int64_t count = std::min<std::int64_t>(16, columns_ - tile * 16);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t column = tile * 16 + i, token = first_row_ + column / shape_.group;
        const float* source = call_.q + token * call_.q_stride + head_of(column) * call_.channels;
        rotate_row(source, row_ + i * width, call_.channels, call_.rotation, token,
                   blocks_.query_scale());
        blocks_.prepare_query(row_ + i * width);
      }
      for (std::int64_t step = 0; step < shape_.steps; ++step) {
        pack_step(row_ + step * kStep, width, count, kStep,
                  q_ + (tile * shape_.steps + step) * kStepBytes);
      }
    }
  }

  void run_chunk(std::int64_t chunk, float* states) {
    clear_states(states);
    const std::int64_t end = std::min((chunk + 1) * kChunkKeys, last_);
    for (std::int64_t key = chunk * kChunkKeys; key < end; key += kBlockKeys) {
      if (key >= call_.sinks && key + kBlockKeys <= first_) continue;
      load_block(key);
      for (std::int64_t tile = 0; tile < column_tiles_; ++tile) {
        attend_block(key, tile, state(states, tile));
      }
    }
  }

  // A position's row in the pages; -1 after the end of what is attended, and between the sinks and
  // the window of all queries, where the page may be another sequence's by now.
  std::int64_t row_of(std::int64_t position) const {
    if (position >= call_.last(task_.sequence) || position < call_.first(task_.sequence)) return -1;
    if (position <= least_position_ - call_.window && position >= call_.sinks) return -1;
    return call_.row_of(task_.sequence, task_.kv_head, position);
  }

  void load_block(std::int64_t first) {
    std::int64_t rows[kBlockKeys];
    for (int i = 0; i < kBlockKeys; ++i) {
      rows[i] = row_of(first + i);
      const std::int64_t next = row_of(first + kBlockKeys + i);
      if (next >= 0) blocks_.prefetch(next);
    }
    blocks_.load(rows);
  }

  // Positions of a tile's columns; -1 for columns that don't exist.
  __m512i positions_of(std::int64_t tile) const {
    alignas(64) std::int32_t positions[16];
    for (int i = 0; i < 16; ++i) {
      const std::int64_t column = tile * 16 + i;
      positions[i] = column < columns_
                         ? static_cast<std::int32_t>(least_position_ + column / shape_.group)
                         : -1;
    }
    return _mm512_load_si512(positions);
  }

  void mask_scores(std::int64_t key, std::int64_t tile) const {
    const std::int64_t low = least_position_ + tile * 16 / shape_.group;
    const std::int64_t high = least_position_ + (tile * 16 + 15) / shape_.group;
    const bool all_exist = tile * 16 + 16 <= columns_;
    if (all_exist && key + kBlockKeys - 1 <= low && key > high - call_.window) return;
    const __m512i positions = positions_of(tile);
    const __m512i before = _mm512_sub_epi32(
        positions, _mm512_set1_epi32(static_cast<std::int32_t>(call_.window)));
    for (int i = 0; i < kBlockKeys; ++i) {
      const __m512i position = _mm512_set1_epi32(static_cast<std::int32_t>(key + i));
      const __mmask16 near = key + i < call_.sinks
                                 ? __mmask16{0xffff}
                                 : _mm512_cmpgt_epi32_mask(position, before);
      const __mmask16 seen = _mm512_cmple_epi32_mask(position, positions) & near;
      const __m512 score = _mm512_load_ps(scores_ + i * 16);
      _mm512_store_ps(scores_ + i * 16,
                      _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score));
    }
  }

  void attend_block(std::int64_t key, std::int64_t tile, const State& state) {
    blocks_.score(q_ + tile * shape_.steps * kStepBytes, scores_);
    mask_scores(key, tile);
    weigh(state);
    blocks_.mix(scores_, state.values());
  }

  // Turns scores into weights, and brings the state to the new greatest score.
  void weigh(const State& state) {
    const __m512 old = _mm512_load_ps(state.greatest());
    __m512 greatest[4] = {old, old, old, old};
    for (int i = 0; i < kBlockKeys; ++i) {
      greatest[i & 3] = _mm512_max_ps(greatest[i & 3], _mm512_load_ps(scores_ + i * 16));
    }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(greatest[0], greatest[1]),
                                     _mm512_max_ps(greatest[2], greatest[3]));
    const __m512 base = finite_or_zero(top);
    __m512 total = _mm512_setzero_ps();
    for (int step = 0; step < kValueSteps; ++step) {
      for (int i = 0; i < 16; ++i) {
        float* row = scores_ + (step * kStep + i) * 16;
        const __m512 low = exp_512(_mm512_sub_ps(_mm512_load_ps(row), base));
        const __m512 high = exp_512(_mm512_sub_ps(_mm512_load_ps(row + 256), base));
        total = _mm512_add_ps(total, _mm512_add_ps(low, high));
        _mm512_store_ps(row, low);
        _mm512_store_ps(row + 256, high);
      }
    }
    const __m512 keep = exp_512(_mm512_sub_ps(old, base));
    _mm512_store_ps(state.total(), _mm512_fmadd_ps(_mm512_load_ps(state.total()), keep, total));
    _mm512_store_ps(state.greatest(), top);
    if (_mm512_cmp_ps_mask(keep, _mm512_set1_ps(1.0f), _CMP_EQ_OQ) == 0xffff) return;
    for (std::int64_t i = 0; i < shape_.channel_tiles * 256; i += 16) {
      float* at = state.values() + i;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), keep));
    }
  }

  // The address of a column's `width` floats among rows of [tokens, heads].
  float* place(float* rows, std::int64_t column, std::int64_t width) const {
    const std::int64_t token = first_row_ + column / shape_.group;
    return rows + (token * call_.heads + head_of(column)) * width;
  }

  std::int64_t columns_of(std::int64_t tile) const {
    return std::min<std::int64_t>(16, columns_ - tile * 16);
  }

  // What queries carry from earlier segments; nothing where there are none.
  void begin_states() const {
    clear_states(states_);
    if (call_.carry == nullptr) return;
    const std::int64_t width = call_.value_width() + 2;
    for (std::int64_t tile = 0; tile < column_tiles_; ++tile) {
      const State into = state(states_, tile);
      for (std::int64_t part = 0; part < shape_.channel_tiles; ++part) {
        __m512 rows[16];
        const __mmask16 mask = lanes(call_.value_width() - part * 16);
        for (std::int64_t i = 0; i < 16; ++i) {
          const float* from = place(call_.carry, tile * 16 + i, width);
          rows[i] = i < columns_of(tile) ? _mm512_maskz_loadu_ps(mask, from + 2 + part * 16)
                                         : _mm512_setzero_ps();
        }
        transpose_16(rows);
        for (int i = 0; i < 16; ++i) {
          _mm512_store_ps(into.values() + part * 256 + i * 16, rows[i]);
        }
      }
      for (std::int64_t i = 0; i < columns_of(tile); ++i) {
        const float* from = place(call_.carry, tile * 16 + i, width);
        into.greatest()[i] = from[0];
        into.total()[i] = from[1];
      }
    }
  }

  // Writes what queries attend to, or what they carry to the next segment.
  void end_states() const {
    const bool carried = call_.carry != nullptr;
    const std::int64_t width = call_.value_width() + (carried ? 2 : 0);
    for (std::int64_t tile = 0; tile < column_tiles_; ++tile) {
      const State from = state(states_, tile);
      const __m512 one = _mm512_set1_ps(1.0f);
      const __m512 share = carried ? one : _mm512_div_ps(one, _mm512_load_ps(from.total()));
      for (std::int64_t part = 0; part < shape_.channel_tiles; ++part) {
        __m512 rows[16];
        for (int i = 0; i < 16; ++i) {
          rows[i] = _mm512_mul_ps(_mm512_load_ps(from.values() + part * 256 + i * 16), share);
        }
        transpose_16(rows);
        const __mmask16 mask = lanes(call_.value_width() - part * 16);
        for (std::int64_t i = 0; i < columns_of(tile); ++i) {
          float* row = place(carried ? call_.carry : call_.out, tile * 16 + i, width);
          _mm512_mask_storeu_ps(row + (carried ? 2 : 0) + part * 16, mask, rows[i]);
        }
      }
      for (std::int64_t i = 0; carried && i < columns_of(tile); ++i) {
        float* row = place(call_.carry, tile * 16 + i, width);
        row[0] = from.greatest()[i];
        row[1] = from.total()[i];
      }
    }
  }

  const AttentionCall& call_;
  const Shape shape_;
  Task task_{};
  std::uint8_t* q_;
  Blocks blocks_;
  float *scores_, *chunk_states_, *states_, *row_;
  std::int64_t columns_ = 0, column_tiles_ = 0, first_row_ = 0, least_position_ = 0;
  std::int64_t first_ = 0, last_ = 0;  // positions the task sees, sinks left out
};

// Writes one token's keys (rotated) and values into its page.
void store_token(const AttentionCall& call, std::int64_t sequence, std::int64_t token) {
  const std::int64_t position = call.contexts[sequence] - call.starts[sequence + 1] + token;
  for (std::int64_t head = 0; head < call.kv_heads; ++head) {
    const std::int64_t row = call.row_of(sequence, head, position) * call.channels;
    rotate_row(call.k + token * call.k_stride + head * call.channels, call.keys + row,
               call.channels, call.rotation, token, 1.0f);
    if (call.values == call.keys) continue;
    const float* value = call.v + token * call.v_stride + head * call.channels;
    std::copy(value, value + call.channels, call.values + row);
  }
}

// The same in INT8; `key` is room for one head's row.
void store_token_bytes(const AttentionCall& call, std::int64_t sequence, std::int64_t token,
                       float* key) {
  const Bytes& to = call.bytes;
  const std::int64_t position = call.contexts[sequence] - call.starts[sequence + 1] + token;
  for (std::int64_t head = 0; head < call.kv_heads; ++head) {
    const std::int64_t row = call.row_of(sequence, head, position);
    const std::int64_t at = row * call.channels, scale = row * to.groups(call.channels);
    rotate_row(call.k + token * call.k_stride + head * call.channels, key, call.channels,
               call.rotation, token, 1.0f);
    if (to.spread) spread_row(key, call.channels);
    quantise_row(key, call.channels, to.group, to.keys + at, to.key_scales + scale);
    if (to.values == to.keys) continue;
    quantise_row(call.v + token * call.v_stride + head * call.channels, call.channels, to.group,
                 to.values + at, to.value_scales + scale);
  }
}

}  // namespace

AttentionTasks::AttentionTasks(const AttentionCall& call)
    : call_(call),
      schedule_(std::make_unique<Schedule>(call)),
      partials_(static_cast<float*>(thread_scratch(3, schedule_->partial_floats * 4))) {}

AttentionTasks::~AttentionTasks() = default;

std::int64_t AttentionTasks::tasks() const {
  return static_cast<std::int64_t>(schedule_->tasks.size());
}

std::int64_t AttentionTasks::merges() const {
  return static_cast<std::int64_t>(schedule_->merges.size());
}

void AttentionTasks::store(std::int64_t begin, std::int64_t end) const {
  const std::int32_t* last = call_.starts + call_.sequences + 1;
  std::int64_t sequence = std::upper_bound(call_.starts, last, begin) - call_.starts - 1;
  std::vector<float> key(call_.bytes.keys != nullptr ? call_.channels : 0);
  for (std::int64_t token = begin; token < end; ++token) {
    while (token >= call_.starts[sequence + 1]) ++sequence;
    if (key.empty()) {
      store_token(call_, sequence, token);
    } else {
      store_token_bytes(call_, sequence, token, key.data());
    }
  }
}

void AttentionTasks::attend(std::int64_t task) const {
  const TileSession session;
  const Task& chosen = schedule_->tasks[task];
  if (call_.bytes.keys != nullptr) {
    Worker<ByteBlocks>(call_).run(chosen, partials_ + chosen.partial);
  } else {
    Worker<FloatBlocks>(call_).run(chosen, partials_ + chosen.partial);
  }
}

void AttentionTasks::merge(std::int64_t index) const {
  const Schedule::Merge& merge = schedule_->merges[index];
  Worker<FloatBlocks>(call_).finish(merge.task, partials_ + merge.task.partial, merge.chunks);
}

void attention_amx(const AttentionCall& call) {
  if (call.tokens == 0) return;
  const AttentionTasks work(call);
  if (call.k != nullptr) {
    each_piece(call.threads, call.tokens, kTokensAtOnce,
               [&](std::int64_t begin, std::int64_t end) { work.store(begin, end); });
  }
  each_piece(call.threads, work.tasks(), 1,
             [&](std::int64_t task, std::int64_t) { work.attend(task); });
  each_piece(work.merges() > 8 ? call.threads : 1, work.merges(), 1,
             [&](std::int64_t index, std::int64_t) { work.merge(index); });
}

}  // namespace firstlight
