// Owns how a row of floats becomes INT8 with fp16 scales, and Hadamard's matrix before it.
// It refuses to know where rows lie and what they mean.
#pragma once
#include <cstdint>

namespace firstlight {

// Turns a row so that each channel is spread over all of a run: runs are the greatest power of two
// that divides the width. In place.
void spread_row(float* row, std::int64_t channels);

// Bytes of a row and a scale for each `group` channels: the greatest magnitude / 127. Numbers that
// are not finite give scales that are not.
void quantise_row(const float* row, std::int64_t channels, std::int64_t group, std::int8_t* bytes,
                  std::uint16_t* scales);

}  // namespace firstlight
