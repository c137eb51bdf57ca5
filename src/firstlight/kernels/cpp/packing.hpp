// Owns the call records of packing weights and of reading rows of packed ones.
#pragma once
#include <cstdint>

#include "weight.hpp"

namespace firstlight {

// Packs [rows, columns]; false, with undefined contents of `target`, when a value would change.
bool pack_weight(const float* source, std::int64_t rows, std::int64_t columns, WeightFormat format,
                 std::uint8_t* target, int threads);

// out[i] = row ids[i] of the weight; the ids are known to exist.
void decode_rows(const Weight& weight, std::int64_t columns, const std::int64_t* ids,
                 std::int64_t count, float* out, int threads);

}  // namespace firstlight
