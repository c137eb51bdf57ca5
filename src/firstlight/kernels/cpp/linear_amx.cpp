// Owns linear maps on AMX tiles: out^T = W x^T, both split three ways (tiles.hpp says how).
// It refuses to know Python, torch and where the weights came from.
//
// The weight is the left operand, so its rows need only the split and no interleaving; each thread
// splits the strip it is about to use into its own scratch (doing so between the multiplications was
// tried: it halves the speed, because tile loads wait for the stores). x is the right operand, split and transposed once for all threads. For a given output element the order of
// all sums depends only on `inputs`: a row's result doesn't depend on the other rows.
#include <algorithm>
#include <atomic>

#include "linear.hpp"
#include "threads.hpp"
#include "tiles.hpp"
#include "vector_math.hpp"

namespace firstlight {
namespace {

constexpr int kMostTiles = 8;                      // of weight in a strip
constexpr int kFewRowsTiles = 4;                   // the same, when it is used once or twice
constexpr int kRowsOfTiles = 4;                    // a column of tiles handled at once
constexpr std::int64_t kBlockSteps = 24;           // 768 channels are summed in the tiles
constexpr std::int64_t kPackedBytes = 6 << 20;     // of x at a time
constexpr std::int64_t kPackedAtOnce = 64;         // steps of a tile of x
constexpr std::int64_t kMostRows = 512;
constexpr std::int64_t kAheadBytes = 4096;         // of weight fetched before its split

// Sixteen rows of one weight; `rows` of them exist.
struct Tile {
  Weight weight;  // its first row is the tile's
  std::int64_t rows = 0;
  int segment = 0;
  std::int64_t first = 0;
};

struct Plan {
  const LinearCall& call;
  std::int64_t steps;         // of 32 channels
  std::int64_t total_tiles;
  std::int64_t first_row, rows, row_tiles;
  std::uint8_t* packed;       // [row_tiles][steps][3] tiles of x

  bool square() const { return row_tiles > 1; }
  std::int64_t block_steps() const {
    const std::int64_t blocks = (steps + kBlockSteps - 1) / kBlockSteps;
    return (steps + blocks - 1) / blocks;
  }
  // The 64 bytes put the steps of a weight row into different sets of the first-level cache.
  std::int64_t left_step_bytes() const { return strip_tiles() * kStepBytes + 64; }
  int strip_tiles() const { return row_tiles > 2 ? kMostTiles : kFewRowsTiles; }
};

std::int64_t tiles_of(std::int64_t outputs) { return (outputs + kTileRows - 1) / kTileRows; }

Tile tile_at(const LinearCall& call, std::int64_t index) {
  int segment = 0;
  if (call.gated) {
    segment = static_cast<int>(index & 1);
    index >>= 1;
  } else {
    while (segment < call.count && index >= tiles_of(call.segments[segment].outputs)) {
      index -= tiles_of(call.segments[segment].outputs);
      ++segment;
    }
    if (segment == call.count) return {};
  }
  const LinearSegment& source = call.segments[segment];
  Tile tile;
  tile.first = index * kTileRows;
  tile.rows = std::clamp<std::int64_t>(source.outputs - tile.first, 0, kTileRows);
  tile.segment = segment;
  tile.weight = source.weight;
  if (tile.rows > 0) tile.weight.data = source.weight.row(tile.first);
  return tile;
}

void pack_rows(const Plan& plan, std::int64_t begin, std::int64_t end) {
  const LinearCall& call = plan.call;
  for (std::int64_t job = begin; job < end; ++job) {
    const std::int64_t tile = job / plan.steps, channel = job % plan.steps * kStep;
    const std::int64_t row = plan.first_row + tile * 16;
    pack_step(call.x + row * call.x_stride + channel, call.x_stride,
              plan.first_row + plan.rows - row, call.inputs - channel,
              plan.packed + job * kStepBytes);
  }
}

// Splits `channels` channels of one weight row; each step of 32 goes one strip step further.
void split_channels(const float* source, std::int64_t channels, std::uint8_t* target,
                    std::int64_t step_bytes) {
  for (; channels >= kStep; channels -= kStep, source += kStep, target += step_bytes) {
    const char* ahead = reinterpret_cast<const char*>(source) + kAheadBytes;
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
    split_row(_mm512_loadu_ps(source), _mm512_loadu_ps(source + 16), target);
  }
  if (channels > 0) {
    split_row(_mm512_maskz_loadu_ps(lanes(channels), source),
              _mm512_maskz_loadu_ps(lanes(channels - 16), source + 16), target);
  }
}

// The same for a packed row.
template <WeightFormat kFormat>
void split_blocks(const std::uint8_t* row, std::int64_t inputs, std::int64_t first_step,
                  std::int64_t steps, std::uint8_t* target, std::int64_t step_bytes) {
  const char* ahead = reinterpret_cast<const char*>(row) + kAheadBytes;
  for (std::int64_t at = 0; first_step == 0 && at < row_bytes_of(kFormat, inputs); at += 64) {
    _mm_prefetch(ahead + at, _MM_HINT_T0);
  }
  each_block<kFormat>(row, inputs, first_step, steps,
                      [&](std::int64_t step, __m512 low, __m512 high) {
                        split_row(low, high, target + step * step_bytes);
                      });
}

// One strip and one block of steps; `left` is [steps][strip_tiles][3] tiles.
struct Strip {
  const Plan& plan;
  const Tile* tiles;
  int count;
  std::int64_t first_step, steps;
  std::uint8_t* left;

  // Whether the second and third parts of all weights are zero.
  bool one_part() const {
    return std::all_of(tiles, tiles + count, [](const Tile& tile) {
      return tile.weight.format == WeightFormat::bfloat16;
    });
  }
  const std::uint8_t* right_at(std::int64_t row_tile) const {
    return plan.packed + (row_tile * plan.steps + first_step) * kStepBytes;
  }
};

void split_weight_row(const Strip& strip, const Tile& tile, int inner, std::uint8_t* out) {
  const std::int64_t inputs = strip.plan.call.inputs, step_bytes = strip.plan.left_step_bytes();
  const std::uint8_t* row = tile.weight.row(inner);
  switch (tile.weight.format) {
    case WeightFormat::affine4:
      return split_blocks<WeightFormat::affine4>(row, inputs, strip.first_step, strip.steps, out,
                                                 step_bytes);
    case WeightFormat::scaled8:
      return split_blocks<WeightFormat::scaled8>(row, inputs, strip.first_step, strip.steps, out,
                                                 step_bytes);
    case WeightFormat::bfloat16:
      return split_blocks<WeightFormat::bfloat16>(row, inputs, strip.first_step, strip.steps, out,
                                                  step_bytes);
    default:
      const std::int64_t first = strip.first_step * kStep;
      split_channels(reinterpret_cast<const float*>(row) + first,
                     std::min(strip.steps * kStep, inputs - first), out, step_bytes);
  }
}

// Splits the weight rows of a strip; rows that don't exist become zero.
void split_strip(const Strip& strip) {
  const int split = strip.plan.square() ? (strip.count + 1) / 2 * 2 : strip.count;
  for (int row = 0; row < split * kTileRows; ++row) {
    const Tile& tile = strip.tiles[row / kTileRows];
    const int inner = row % kTileRows;
    std::uint8_t* out = strip.left + row / kTileRows * kStepBytes + inner * 64;
    if (inner < tile.rows) {
      split_weight_row(strip, tile, inner, out);
      continue;
    }
    for (std::int64_t step = 0; step < strip.steps; ++step) {
      split_row(_mm512_setzero_ps(), _mm512_setzero_ps(), out + step * strip.plan.left_step_bytes());
    }
  }
}

inline void multiply_square() {
  tile_multiply<0, 4, 6>();
  tile_multiply<1, 5, 6>();
  tile_multiply<2, 4, 7>();
  tile_multiply<3, 5, 7>();
}

template <int kFirst>
inline void load_pair(const std::uint8_t* source, std::int64_t apart) {
  tile_load<kFirst>(source);
  tile_load<kFirst + 1>(source + apart);
}

// One step of 2 weight tiles with 2 tiles of rows. Each sum sees its products in the order of
// step_column: 1x3 1x2 1x1 3x1 2x1 2x2.
template <bool kOnePart>
inline void step_square(const std::uint8_t* left, const std::uint8_t* right,
                        std::int64_t right_apart) {
  load_pair<4>(left, kStepBytes);
  load_pair<6>(right + 2 * kTileBytes, right_apart);
  multiply_square();
  load_pair<6>(right + kTileBytes, right_apart);
  multiply_square();
  load_pair<6>(right, right_apart);
  multiply_square();
  if constexpr (kOnePart) return;
  load_pair<4>(left + 2 * kTileBytes, kStepBytes);
  multiply_square();
  load_pair<4>(left + kTileBytes, kStepBytes);
  multiply_square();
  load_pair<6>(right + kTileBytes, right_apart);
  multiply_square();
}

// Takes a block's tile of sums: as it is from the first block, else added. Blocks are summed apart
// because one long chain of fp32 roundings would drift when all terms have one sign.
template <int kTile>
inline void take_sums(const Strip& strip, float* sums) {
  if (strip.first_step == 0) {
    tile_store<kTile>(sums);
    return;
  }
  alignas(64) float fresh[256];
  tile_store<kTile>(fresh);
  for (int i = 0; i < 256; i += 16) {
    _mm512_store_ps(sums + i, _mm512_add_ps(_mm512_load_ps(sums + i), _mm512_load_ps(fresh + i)));
  }
}

// `sums` is [row_tile][strip_tiles] of 16 x 16 numbers; `first` is the first of kTiles in it.
template <int kTiles>
void run_column(const Strip& strip, std::int64_t row_tile, int first, float* sums) {
  each_tile<kTiles>([&](auto i) { tile_zero<i>(); });
  const std::uint8_t* left = strip.left + first * kStepBytes;
  const std::uint8_t* right = strip.right_at(row_tile);
  const std::int64_t left_apart = strip.plan.left_step_bytes();
  if (strip.one_part()) {
    for (std::int64_t step = 0; step < strip.steps; ++step) {
      step_column<kTiles, true>(left + step * left_apart, right + step * kStepBytes);
    }
  } else {
    for (std::int64_t step = 0; step < strip.steps; ++step) {
      step_column<kTiles>(left + step * left_apart, right + step * kStepBytes);
    }
  }
  each_tile<kTiles>([&](auto i) { take_sums<i>(strip, sums + (first + i) * 256); });
}

void run_columns(const Strip& strip, std::int64_t row_tile, float* sums) {
  for (int first = 0; first < strip.count; first += kRowsOfTiles) {
    switch (strip.count - first) {
      case 1: run_column<1>(strip, row_tile, first, sums); break;
      case 2: run_column<2>(strip, row_tile, first, sums); break;
      case 3: run_column<3>(strip, row_tile, first, sums); break;
      default: run_column<4>(strip, row_tile, first, sums);
    }
  }
}

// Two weight tiles from `first` with two tiles of rows.
void run_square(const Strip& strip, std::int64_t row_tile, int first, float* sums) {
  // Sums 0..3 of step_square are (left, right) = (0, 0) (1, 0) (0, 1) (1, 1).
  const auto at = [&](int i) { return sums + ((i >> 1) * strip.plan.strip_tiles() + (i & 1) + first) * 256; };
  each_tile<4>([&](auto i) { tile_zero<i>(); });
  const std::uint8_t* left = strip.left + first * kStepBytes;
  const std::uint8_t* right = strip.right_at(row_tile);
  const std::int64_t apart = strip.plan.steps * kStepBytes;
  const std::int64_t left_apart = strip.plan.left_step_bytes();
  if (strip.one_part()) {
    for (std::int64_t step = 0; step < strip.steps; ++step) {
      step_square<true>(left + step * left_apart, right + step * kStepBytes, apart);
    }
  } else {
    for (std::int64_t step = 0; step < strip.steps; ++step) {
      step_square<false>(left + step * left_apart, right + step * kStepBytes, apart);
    }
  }
  each_tile<4>([&](auto i) { take_sums<i>(strip, at(i)); });
}

void load_rows(const float* sums, __m512 (&rows)[16]) {
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_ps(sums + i * 16);
  transpose_16(rows);
}

// Adds bias and residual, or gates, and writes the 16 x 16 results of one tile.
void finish_tile(const Plan& plan, const Tile& tile, std::int64_t row_tile, const float* sums) {
  const LinearSegment& segment = plan.call.segments[tile.segment];
  const __mmask16 mask = lanes(tile.rows);
  __m512 rows[16], up[16];
  load_rows(sums, rows);
  if (plan.call.gated) load_rows(sums + 256, up);
  const __m512 bias =
      segment.bias ? _mm512_maskz_loadu_ps(mask, segment.bias + tile.first) : _mm512_setzero_ps();
  const float* up_bias_source = plan.call.gated ? plan.call.segments[1].bias : nullptr;
  const __m512 up_bias = up_bias_source ? _mm512_maskz_loadu_ps(mask, up_bias_source + tile.first)
                                        : _mm512_setzero_ps();
  const std::int64_t first = plan.first_row + row_tile * 16;
  const std::int64_t count = std::min<std::int64_t>(16, plan.first_row + plan.rows - first);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = (first + i) * segment.outputs + tile.first;
    __m512 value = _mm512_add_ps(rows[i], bias);
    if (plan.call.gated) value = _mm512_mul_ps(silu_512(value), _mm512_add_ps(up[i], up_bias));
    if (segment.residual) {
      value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, segment.residual + at));
    }
    _mm512_mask_storeu_ps(segment.out + at, mask, value);
  }
}

// Cuts the weight tiles into strips, as many for each thread as for the others.
struct Strips {
  std::int64_t unit, units, count;
  Strips(const Plan& plan, int threads) : unit(plan.call.gated || plan.square() ? 2 : 1) {
    units = (plan.total_tiles + unit - 1) / unit;
    const std::int64_t most = plan.strip_tiles() / unit;
    count = (units + most - 1) / most;
    if (units >= threads) count = (count + threads - 1) / threads * threads;
  }
  // Fills `tiles` with those of a strip, empty ones after its end; returns how many exist.
  int fill(const Plan& plan, std::int64_t strip, Tile* tiles) const {
    std::fill(tiles, tiles + kMostTiles, Tile{});
    if (strip >= count) return 0;
    const std::int64_t begin = units * strip / count * unit;
    const std::int64_t end = std::min(units * (strip + 1) / count * unit, plan.total_tiles);
    for (std::int64_t i = begin; i < end; ++i) tiles[i - begin] = tile_at(plan.call, i);
    return static_cast<int>(end - begin);
  }
};

void finish_rows(const Strip& strip, std::int64_t row_tile, const float* sums) {
  for (int i = 0; i < strip.count; i += strip.plan.call.gated ? 2 : 1) {
    finish_tile(strip.plan, strip.tiles[i], row_tile, sums + i * 256);
  }
}

// All row tiles with one block of steps; the last block finishes. `sums` holds all row tiles only
// when there are several blocks.
void run_block(const Strip& strip, float* sums) {
  const Plan& plan = strip.plan;
  const bool whole = plan.steps <= kBlockSteps;
  const bool last = strip.first_step + strip.steps == plan.steps;
  const std::int64_t row_sums = plan.strip_tiles() * 256;
  for (std::int64_t row_tile = 0; row_tile < plan.row_tiles; row_tile += 2) {
    float* here = whole ? sums : sums + row_tile * row_sums;
    const bool pair = row_tile + 1 < plan.row_tiles;
    if (pair) {
      for (int first = 0; first < strip.count; first += 2) run_square(strip, row_tile, first, here);
    } else {
      run_columns(strip, row_tile, here);
    }
    if (last) finish_rows(strip, row_tile, here);
    if (last && pair) finish_rows(strip, row_tile + 1, here + row_sums);
  }
}

void run_strips(const Plan& plan, const Strips& strips, std::atomic<std::int64_t>& claimed) {
  const std::int64_t steps = plan.block_steps();
  const std::int64_t kept = plan.steps <= kBlockSteps ? 2 : plan.row_tiles;
  void* left = thread_scratch(0, steps * plan.left_step_bytes());
  void* sums = thread_scratch(1, kept * plan.strip_tiles() * kTileBytes);
  Tile tiles[kMostTiles];
  while (const int count = strips.fill(plan, claimed.fetch_add(1), tiles)) {
    for (std::int64_t first = 0; first < plan.steps; first += steps) {
      const Strip strip{plan, tiles, count, first, std::min(steps, plan.steps - first),
                        static_cast<std::uint8_t*>(left)};
      split_strip(strip);
      run_block(strip, static_cast<float*>(sums));
    }
  }
}

}  // namespace

void linear_amx(const LinearCall& call) {
  if (call.rows == 0) return;
  Plan plan{call, (call.inputs + kStep - 1) / kStep, 0, 0, 0, 0, nullptr};
  for (int i = 0; i < call.count; ++i) plan.total_tiles += tiles_of(call.segments[i].outputs);
  if (plan.total_tiles == 0) return;
  const std::int64_t most = std::clamp<std::int64_t>(
      kPackedBytes / (plan.steps * kStepBytes) * 16 / 32 * 32, 64, kMostRows);
  const std::int64_t parts = (call.rows + most - 1) / most;
  const std::int64_t rows = ((call.rows + parts - 1) / parts + 31) / 32 * 32;
  for (; plan.first_row < call.rows; plan.first_row += plan.rows) {
    plan.rows = std::min(rows, call.rows - plan.first_row);
    plan.row_tiles = (plan.rows + 15) / 16;
    plan.packed = static_cast<std::uint8_t*>(
        thread_scratch(2, plan.row_tiles * plan.steps * kStepBytes));
    std::atomic<std::int64_t> claimed{0};
    each_piece(call.threads, plan.row_tiles * plan.steps, kPackedAtOnce,
               [&](std::int64_t begin, std::int64_t end) { pack_rows(plan, begin, end); });
    on_threads(call.threads, [&](int, int threads) {
      const TileSession session;
      run_strips(plan, Strips(plan, threads), claimed);
    });
  }
}

}  // namespace firstlight
