// Owns causal attention over a paged cache on AMX tiles, block by block with a running softmax.
// It refuses to know Python, torch and who filled the cache.
//
// Everything is transposed: keys are the left operand and 16 query columns (token, head of a group)
// the right one, so that scores are [key, column] and the softmax works on whole vectors; their
// rows, split again, are the right operand of V^T P^T. Blocks of 64 keys stand at multiples of 64
// and chunks of 1024 keys at multiples of 1024; chunks are summed apart and merged in order. A
// token's result therefore doesn't depend on batch, chunked prefill, or how work was cut.
#include <algorithm>

#include "attention.hpp"
#include "attention_schedule.hpp"
#include "attention_state.hpp"
#include "threads.hpp"
#include "tiles.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr int kBlockKeys = 64;
constexpr int kKeyTiles = kBlockKeys / kTileRows;
constexpr std::int64_t kTokensAtOnce = 32;  // written to the pages by one thread
constexpr int kValueSteps = kBlockKeys / kStep;
// One thread's scratch and the steps of one task.
class Worker {
 public:
  explicit Worker(const AttentionCall& call) : call_(call), shape_(call) {
    const std::int64_t columns = kTaskColumns / 16;
    const std::int64_t q = columns * shape_.steps * kStepBytes;
    const std::int64_t k = shape_.steps * kKeyTiles * kStepBytes;
    const std::int64_t v = kValueSteps * shape_.channel_tiles * kStepBytes;
    const std::int64_t p = kValueSteps * kStepBytes, scores = kBlockKeys * 64;
    const std::int64_t states = columns * shape_.state() * 4;
    const std::int64_t row = shape_.steps * kStep * 4 * 16;
    auto* at = static_cast<std::uint8_t*>(
        thread_scratch(0, q + k + v + p + scores + 2 * states + row));
    const auto take = [&](std::int64_t bytes) {
      std::uint8_t* block = at;
      at += bytes;
      return block;
    };
    q_ = take(q);
    k_ = take(k);
    v_ = take(v);
    p_ = take(p);
    scores_ = reinterpret_cast<float*>(take(scores));
    chunk_states_ = reinterpret_cast<float*>(take(states));
    states_ = reinterpret_cast<float*>(take(states));
    row_ = reinterpret_cast<float*>(take(row));
  }

  // Attends; a task of one chunk leaves its state in `partial`, any other writes its output.
  void run(const Task& task, float* partial) {
    start(task);
    const std::int64_t last = greatest_position_ + 1;
    const std::int64_t first = std::max<std::int64_t>(0, least_position_ - call_.window + 1);
    if (task.chunk != kAllChunks) {
      run_chunk(task.chunk, first, last, partial);
      return;
    }
    clear_states(states_);
    for (std::int64_t chunk = first / kChunkKeys; chunk * kChunkKeys < last; ++chunk) {
      run_chunk(chunk, first, last, chunk_states_);
      for (std::int64_t i = 0; i < column_tiles_; ++i) {
        merge_state(state(states_, i), state(chunk_states_, i), shape_);
      }
    }
    write(states_);
  }

  // Merges the partial results of a task's chunks, in order, and writes its output.
  void finish(const Task& task, const float* partials, std::int64_t chunks) {
    start_columns(task);
    clear_states(states_);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (std::int64_t i = 0; i < column_tiles_; ++i) {
        float* from = const_cast<float*>(partials) +
                      (chunk * column_tiles_ + i) * shape_.state();
        merge_state(state(states_, i), State{from}, shape_);
      }
    }
    write(states_);
  }

 private:
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
    greatest_position_ = least_position_ + task.tokens - 1;
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
        rotate_row(source, row_ + i * width, call_.channels, call_.rotation, token, call_.scale);
      }
      for (std::int64_t step = 0; step < shape_.steps; ++step) {
        pack_step(row_ + step * kStep, width, count, kStep,
                  q_ + (tile * shape_.steps + step) * kStepBytes);
      }
    }
  }

  void run_chunk(std::int64_t chunk, std::int64_t first, std::int64_t last, float* states) {
    clear_states(states);
    const std::int64_t begin = std::max(chunk * kChunkKeys, first / kBlockKeys * kBlockKeys);
    const std::int64_t end = std::min((chunk + 1) * kChunkKeys, last);
    for (std::int64_t key = begin; key < end; key += kBlockKeys) {
      load_block(key);
      for (std::int64_t tile = 0; tile < column_tiles_; ++tile) {
        attend_block(key, tile, state(states, tile));
      }
    }
  }

  // Offset of a position's row in the pages; -1 after the end of the context, and behind the window
  // of all queries, where the page may be another sequence's by now.
  std::int64_t row_of(std::int64_t position) const {
    if (position >= call_.contexts[task_.sequence]) return -1;
    if (position <= least_position_ - call_.window) return -1;
    const std::int32_t* table = call_.table + task_.sequence * call_.table_width;
    const std::int64_t page = table[position / call_.slots];
    return ((page * call_.kv_heads + task_.kv_head) * call_.slots + position % call_.slots) *
           call_.channels;
  }

  void prefetch_row(const float* row) const {
    for (std::int64_t i = 0; i < call_.channels; i += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(row + i), _MM_HINT_T1);
    }
  }

  // Splits the keys, and the values transposed, of 64 positions; those after the context are zero.
  void load_block(std::int64_t first) {
    const float* value_rows[kBlockKeys];
    for (int i = 0; i < kBlockKeys; ++i) {
      const std::int64_t row = row_of(first + i), next = row_of(first + kBlockKeys + i);
      if (next >= 0) {
        prefetch_row(call_.keys + next);
        prefetch_row(call_.values + next);
      }
      split_key(row < 0 ? nullptr : call_.keys + row, i);
      value_rows[i] = row < 0 ? nullptr : call_.values + row;
    }
    for (int step = 0; step < kValueSteps; ++step) {
      for (std::int64_t tile = 0; tile < shape_.channel_tiles; ++tile) {
        split_values(value_rows + step * kStep, tile,
                     v_ + (step * shape_.channel_tiles + tile) * kStepBytes);
      }
    }
  }

  void split_key(const float* source, int index) {
    std::uint8_t* target = k_ + index / kTileRows * kStepBytes + index % kTileRows * 64;
    for (std::int64_t step = 0; step < shape_.steps; ++step) {
      const std::int64_t left = source ? call_.channels - step * kStep : 0;
      const float* at = source ? source + step * kStep : call_.keys;
      split_row(_mm512_maskz_loadu_ps(lanes(left), at),
                _mm512_maskz_loadu_ps(lanes(left - 16), at + 16),
                target + step * kKeyTiles * kStepBytes);
    }
  }

  void split_values(const float* const* rows, std::int64_t tile, std::uint8_t* target) const {
    __m512 low[16], high[16];
    const __mmask16 mask = lanes(call_.value_width() - tile * 16);
    const auto load = [&](const float* row) {
      return row ? _mm512_maskz_loadu_ps(mask, row + tile * 16) : _mm512_setzero_ps();
    };
    for (int i = 0; i < 16; ++i) {
      low[i] = load(rows[i]);
      high[i] = load(rows[16 + i]);
    }
    transpose_16(low);
    transpose_16(high);
    for (int i = 0; i < 16; ++i) split_row(low[i], high[i], target + i * 64);
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
      const __mmask16 seen = _mm512_cmple_epi32_mask(position, positions) &
                             _mm512_cmpgt_epi32_mask(position, before);
      const __m512 score = _mm512_load_ps(scores_ + i * 16);
      _mm512_store_ps(scores_ + i * 16,
                      _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score));
    }
  }

  void attend_block(std::int64_t key, std::int64_t tile, const State& state) {
    load_sums<kKeyTiles>(scores_, true);
    for (std::int64_t step = 0; step < shape_.steps; ++step) {
      step_column<kKeyTiles>(k_ + step * kKeyTiles * kStepBytes,
                             q_ + (tile * shape_.steps + step) * kStepBytes);
    }
    store_sums<kKeyTiles>(scores_);
    mask_scores(key, tile);
    weigh(state);
    for (std::int64_t first = 0; first < shape_.channel_tiles; first += 4) {
      float* values = state.values() + first * 256;
      switch (shape_.channel_tiles - first) {
        case 1: add_values<1>(first, values); break;
        case 2: add_values<2>(first, values); break;
        case 3: add_values<3>(first, values); break;
        default: add_values<4>(first, values);
      }
    }
  }

  template <int kTiles>
  void add_values(std::int64_t first, float* values) const {
    load_sums<kTiles>(values, false);
    for (int step = 0; step < kValueSteps; ++step) {
      step_column<kTiles>(v_ + (step * shape_.channel_tiles + first) * kStepBytes,
                          p_ + step * kStepBytes);
    }
    store_sums<kTiles>(values);
  }

  // Turns scores into split weights, and brings the state to the new greatest score.
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
        const float* row = scores_ + (step * kStep + i) * 16;
        const __m512 low = exp_512(_mm512_sub_ps(_mm512_load_ps(row), base));
        const __m512 high = exp_512(_mm512_sub_ps(_mm512_load_ps(row + 256), base));
        total = _mm512_add_ps(total, _mm512_add_ps(low, high));
        split_row_rounded(low, high, p_ + step * kStepBytes + i * 64);
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

  void write(float* states) const {
    for (std::int64_t tile = 0; tile < column_tiles_; ++tile) {
      const State from = state(states, tile);
      const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(from.total()));
      for (std::int64_t part = 0; part < shape_.channel_tiles; ++part) {
        __m512 rows[16];
        for (int i = 0; i < 16; ++i) {
          rows[i] = _mm512_mul_ps(_mm512_load_ps(from.values() + part * 256 + i * 16), share);
        }
        transpose_16(rows);
        const __mmask16 mask = lanes(call_.value_width() - part * 16);
        for (std::int64_t i = 0; i < 16 && tile * 16 + i < columns_; ++i) {
          const std::int64_t column = tile * 16 + i, token = first_row_ + column / shape_.group;
          float* target =
              call_.out + (token * call_.heads + head_of(column)) * call_.value_width() + part * 16;
          _mm512_mask_storeu_ps(target, mask, rows[i]);
        }
      }
    }
  }

  const AttentionCall& call_;
  const Shape shape_;
  Task task_{};
  std::uint8_t *q_, *k_, *v_, *p_;
  float *scores_, *chunk_states_, *states_, *row_;
  std::int64_t columns_ = 0, column_tiles_ = 0, first_row_ = 0;
  std::int64_t least_position_ = 0, greatest_position_ = 0;
};

// Writes one token's keys (rotated) and values into its page.
void store_token(const AttentionCall& call, std::int64_t sequence, std::int64_t token) {
  const std::int64_t position = call.contexts[sequence] - call.starts[sequence + 1] + token;
  const std::int64_t page = call.table[sequence * call.table_width + position / call.slots];
  for (std::int64_t head = 0; head < call.kv_heads; ++head) {
    const std::int64_t row =
        ((page * call.kv_heads + head) * call.slots + position % call.slots) * call.channels;
    rotate_row(call.k + token * call.k_stride + head * call.channels, call.keys + row,
               call.channels, call.rotation, token, 1.0f);
    if (call.values == call.keys) continue;
    const float* value = call.v + token * call.v_stride + head * call.channels;
    std::copy(value, value + call.channels, call.values + row);
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
  for (std::int64_t token = begin; token < end; ++token) {
    while (token >= call_.starts[sequence + 1]) ++sequence;
    store_token(call_, sequence, token);
  }
}

void AttentionTasks::attend(std::int64_t task) const {
  const TileSession session;
  Worker(call_).run(schedule_->tasks[task], partials_ + schedule_->tasks[task].partial);
}

void AttentionTasks::merge(std::int64_t index) const {
  const Schedule::Merge& merge = schedule_->merges[index];
  Worker(call_).finish(merge.task, partials_ + merge.task.partial, merge.chunks);
}

void attention_amx(const AttentionCall& call) {
  if (call.tokens == 0) return;
  const AttentionTasks work(call);
  each_piece(call.threads, call.tokens, kTokensAtOnce,
             [&](std::int64_t begin, std::int64_t end) { work.store(begin, end); });
  each_piece(call.threads, work.tasks(), 1,
             [&](std::int64_t task, std::int64_t) { work.attend(task); });
  each_piece(work.merges() > 8 ? call.threads : 1, work.merges(), 1,
             [&](std::int64_t index, std::int64_t) { work.merge(index); });
}

}  // namespace firstlight
