// Sources: https://github.com/MooreThreads/torch_musa/issues/NUMBER unless a row says otherwise.
#include "rules.hpp"

#include <algorithm>
#include <array>
#include <set>

#include "device.hpp"

namespace emulated {

namespace {

using c10::ScalarType;

struct Rule {
  const char* name;      // operator without overload and trailing underscore, "*" for all
  ScalarType dtype;      // Undefined: whatever it computes on
  int below;             // refused on architectures below this number
  const char* source;
};

constexpr int kAlways = 1000;

constexpr std::array kRules{
    Rule{"*", ScalarType::BFloat16, 22, "#122, wontfix"},
    Rule{"*", ScalarType::Float8_e4m3fn, 31, "FP8 is storage only below MP31"},
    Rule{"*", ScalarType::Float8_e5m2, 31, "FP8 is storage only below MP31"},
    Rule{"_scaled_mm", ScalarType::Undefined, 31, "needs MP31"},
    Rule{"_int_mm", ScalarType::Undefined, kAlways, "not among the operators of 2.7.1"},
    Rule{"*", ScalarType::ComplexFloat, kAlways, "nobody has listed complex operators"},
    Rule{"*", ScalarType::ComplexDouble, kAlways, "nobody has listed complex operators"},
    Rule{"sum", ScalarType::Byte, 31, "#86"},
    Rule{"prod", ScalarType::Bool, 22, "#42"},
};

// What moves bytes without computing works for every dtype.
const std::set<std::string> kMoves{"zero", "fill", "_to_copy", "copy", "alias", "unfold",
                                   "record_stream", "cat", "index_select", "index_copy",
                                   "slice_scatter", "select_scatter", "expand_copy", "clone"};

const std::set<std::string> kProducts{"mm", "bmm", "addmm", "baddbmm"};
// muDNN multiplies no fp64 matrices (Torch-FL#215).
const std::set<std::string> kMatrix{"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "addr"};
// Of other fp64 operators "many" are missing and nobody has listed them. These are refused so that
// no sampling and no table comes to rely on one; TORCH_USE_MUSA_DOUBLE_CAST lets them run.
const std::set<std::string> kDoubtful{"cumsum", "cumprod", "_softmax", "_log_softmax",
                                      "sort",   "topk",    "exp",      "searchsorted",
                                      "cos",    "sin",     "pow",      "logsumexp"};

std::string plain(std::string name) {
  if (name.rfind("aten::", 0) == 0) {
    name.erase(0, 6);
  }
  if (name.size() > 1 && name.back() == '_') {
    name.pop_back();
  }
  return name;
}

bool has(const std::vector<ScalarType>& dtypes, ScalarType wanted) {
  return std::find(dtypes.begin(), dtypes.end(), wanted) != dtypes.end();
}

}  // namespace

std::optional<std::string> refusal(const std::string& name,
                                   const std::vector<ScalarType>& dtypes) {
  const auto word = plain(name);
  if (kMoves.count(word) != 0) {
    return std::nullopt;
  }
  const bool missing = kMatrix.count(word) != 0 ||
                       (kDoubtful.count(word) != 0 && !settings().double_cast);
  if (missing && has(dtypes, ScalarType::Double)) {
    return "\"" + word + "\" not implemented for 'Double' on MUSA (emulated: muDNN lacks it)";
  }
  for (const auto& rule : kRules) {
    const bool named = std::string("*") == rule.name || word == rule.name;
    const bool typed = rule.dtype == ScalarType::Undefined || has(dtypes, rule.dtype);
    if (!named || !typed || settings().arch >= rule.below) {
      continue;
    }
    const bool any_type = rule.dtype == ScalarType::Undefined;
    const auto type = any_type ? "its dtypes" : c10::toString(rule.dtype);
    return "\"" + word + "\" not implemented for '" + type + "' on MUSA architecture " +
           std::to_string(settings().arch) + " (emulated: " + rule.source + ")";
  }
  return std::nullopt;
}

bool returns_garbage(const std::string& name, const std::string& overload,
                     const std::vector<ScalarType>& dtypes) {
  const auto word = plain(name);
  const bool widened = overload == "dtype" || overload == "dtype_out";
  if (kProducts.count(word) != 0 && widened) {
    return !settings().right_out_dtype;
  }
  return word == "log" && name.back() == '_' && has(dtypes, ScalarType::Double);
}

}  // namespace emulated
