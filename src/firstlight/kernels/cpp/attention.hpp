// Owns the call record of attention over a paged cache.
#pragma once
#include <cstdint>
#include <limits>
#include <memory>

namespace firstlight {

// Rotation of the first 2 * pairs channels; cos and sin are [table_rows, pairs]. Off when pairs = 0.
struct Rotation {
  const std::int64_t* positions = nullptr;  // [tokens]
  const float* cos = nullptr;
  const float* sin = nullptr;
  std::int64_t pairs = 0;
  std::int64_t table_rows = 0;
};

// Pages in INT8 in the place of `keys` and `values`, and their fp16 scales: one for a row, or for
// each `group` channels of it, where values are the first channels of keys. Off when `keys` is null.
struct Bytes {
  std::int8_t *keys = nullptr, *values = nullptr;
  std::uint16_t *key_scales = nullptr, *value_scales = nullptr;
  std::int64_t group = 0;
  bool spread = false;  // keys and queries are multiplied by Hadamard's matrix

  std::int64_t groups(std::int64_t channels) const { return (channels + group - 1) / group; }
};

struct AttentionCall {
  const float *q = nullptr, *k = nullptr, *v = nullptr;  // rows of heads, strides between tokens
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  std::int64_t tokens = 0, heads = 0, kv_heads = 0, channels = 0;
  float *keys = nullptr, *values = nullptr;  // [pages, kv_heads, slots, channels]
  std::int64_t pages = 0, slots = 0;
  // Values have so many channels, the first ones of their rows; 0 for all. Rows of latents are keys
  // and values at once: then `values` is `keys`, and new rows are written once.
  std::int64_t value_channels = 0;
  const std::int32_t *starts = nullptr, *contexts = nullptr, *table = nullptr;
  std::int64_t sequences = 0, table_width = 0;
  float scale = 1.0f;
  std::int64_t window = std::numeric_limits<std::int32_t>::max();
  std::int64_t sinks = 0;  // positions before this are seen whatever the window
  Rotation rotation;
  float* out = nullptr;  // [tokens, heads, value width]
  int threads = 1;
  Bytes bytes;

  // A segment: positions [firsts, lasts) of each sequence are attended on top of what queries carry,
  // [tokens, heads, value width + 2]: greatest score, sum of weights, weighted values. Tables begin
  // at `firsts`. Without a segment these are null. Where `k` is null nothing is written.
  const std::int32_t *firsts = nullptr, *lasts = nullptr;
  float* carry = nullptr;

  std::int64_t value_width() const { return value_channels > 0 ? value_channels : channels; }
  std::int64_t first(std::int64_t sequence) const { return firsts ? firsts[sequence] : 0; }
  std::int64_t last(std::int64_t sequence) const {
    return lasts ? lasts[sequence] : contexts[sequence];
  }
  // The row of a position among those of all pages and key/value heads.
  std::int64_t row_of(std::int64_t sequence, std::int64_t kv_head, std::int64_t position) const {
    const std::int64_t at = position - first(sequence);
    const std::int64_t page = table[sequence * table_width + at / slots];
    return (page * kv_heads + kv_head) * slots + at % slots;
  }
};

// Throws std::out_of_range or std::invalid_argument before anything is written.
void check_attention(const AttentionCall& call);
void attention_amx(const AttentionCall& call);

struct Schedule;

// The same work in pieces for any thread: all tokens must be stored before the first attend, all
// tasks attended before the first merge. The thread that makes it must outlive the work.
class AttentionTasks {
 public:
  explicit AttentionTasks(const AttentionCall& call);
  ~AttentionTasks();
  AttentionTasks(const AttentionTasks&) = delete;
  AttentionTasks& operator=(const AttentionTasks&) = delete;

  std::int64_t tasks() const;
  std::int64_t merges() const;
  void store(std::int64_t begin, std::int64_t end) const;  // tokens into their pages
  void attend(std::int64_t task) const;
  void merge(std::int64_t index) const;

 private:
  const AttentionCall& call_;
  std::unique_ptr<Schedule> schedule_;
  float* partials_;
};

// Copies one head's row, rotated and multiplied by `scale`.
void rotate_row(const float* source, float* target, std::int64_t channels, const Rotation& rotation,
                std::int64_t token, float scale);

struct RotaryCall {
  const float *q = nullptr, *k = nullptr;
  std::int64_t q_stride = 0, k_stride = 0;
  std::int64_t tokens = 0, heads = 0, kv_heads = 0, channels = 0;
  Rotation rotation;
  float *q_out = nullptr, *k_out = nullptr;  // [tokens, heads, channels]
  int threads = 1;
};

void check_positions(const Rotation& rotation, std::int64_t tokens);  // throws std::out_of_range
void rotary(const RotaryCall& call);

}  // namespace firstlight
