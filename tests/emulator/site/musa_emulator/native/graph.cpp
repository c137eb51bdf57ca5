// Replay runs the captured operators anew and copies what they make into the tensors that the
// capture made.
#include "graph.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include "device.hpp"
#include "operators.hpp"
#include "timeline.hpp"

namespace emulated {

namespace {

Graph* g_active = nullptr;
int g_live = 0;

}  // namespace

Graph::~Graph() { reset(); }

void Graph::capture_begin() {
  TORCH_CHECK(settings().arch >= 31, "MUSA graphs need architecture 31, this is ",
              settings().arch, " (emulated: vllm-musa#184)");
  TORCH_CHECK(g_active == nullptr, "a MUSA graph is being captured already");
  reset();
  g_active = this;
  Timeline::get().capturing = true;
}

void Graph::capture_end() {
  TORCH_CHECK(g_active == this, "this MUSA graph is not being captured");
  g_active = nullptr;
  Timeline::get().capturing = false;
  if (g_live >= settings().live_graphs) {
    calls_.clear();
    TORCH_CHECK(false, "MUSA error: an illegal memory access was encountered (emulated: ", g_live,
                " graph executables are live, the driver has room for no more)");
  }
  ready_ = true;
  ++g_live;
}

void Graph::replay() {
  TORCH_CHECK(ready_, "this MUSA graph was not captured");
  const at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& call : calls_) {
    auto stack = call.arguments;
    call.op.callBoxed(&stack);
    for (size_t i = 0; i < stack.size(); ++i) {
      if (!stack[i].isTensor() || !stack[i].toTensor().defined()) {
        continue;
      }
      const auto &made = stack[i].toTensor(), &kept = call.results[i].toTensor();
      if (!made.is_alias_of(kept)) {
        on_host(kept).copy_(on_host(made));
      }
    }
  }
}

void Graph::reset() {
  if (g_active == this) {
    g_active = nullptr;
    Timeline::get().capturing = false;
  }
  calls_.clear();
  g_live -= ready_ ? 1 : 0;
  ready_ = false;
}

void Graph::note(const c10::OperatorHandle& op, torch::jit::Stack arguments,
                 torch::jit::Stack results) {
  if (g_active != nullptr) {
    for (const auto& result : results) {
      TORCH_CHECK(result.isTensor(), op.schema().name(), " cannot be captured by the emulation");
    }
    g_active->calls_.push_back({op, std::move(arguments), std::move(results)});
  }
}

int Graph::num_live() { return g_live; }

}  // namespace emulated
