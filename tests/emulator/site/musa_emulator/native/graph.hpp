// Owns capture and replay: a graph keeps the operators called while it was captured, with the
// tensors they were called on, and calls them again on the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace emulated {

struct Call {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
  torch::jit::Stack results;
};

class Graph {
 public:
  ~Graph();
  void capture_begin();
  void capture_end();  // raises when the driver has no room for another executable
  void replay();
  void reset();

  // Called by the fallback after every operator; does nothing when no graph is captured.
  static void note(const c10::OperatorHandle& op, torch::jit::Stack arguments,
                   torch::jit::Stack results);
  static int num_live();

 private:
  bool ready_ = false;
  std::vector<Call> calls_;
};

}  // namespace emulated
