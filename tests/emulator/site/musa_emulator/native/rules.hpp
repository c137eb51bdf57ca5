// Owns what the vendor's stacks are documented not to compute, per architecture. Data, not code:
// every row has the public thread it comes from.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace emulated {

// Why the operator cannot run on these dtypes on the emulated architecture; nothing when it can.
std::optional<std::string> refusal(const std::string& name,
                                   const std::vector<c10::ScalarType>& dtypes);

// Whether the operator is one that returns wrong numbers without an error.
bool returns_garbage(const std::string& name, const std::string& overload,
                     const std::vector<c10::ScalarType>& dtypes);

}  // namespace emulated
