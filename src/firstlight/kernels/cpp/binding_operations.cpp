// Owns how each operation's Python arguments become a native call.
// It refuses to know how anything is computed.
#include <array>

#include "attention.hpp"
#include "binding_calls.hpp"
#include "binding_support.hpp"
#include "linear.hpp"
#include "norms.hpp"
#include "operations.hpp"

namespace firstlight {
namespace {

PyObject* run_linear_one(Arguments arguments, Py_ssize_t count, const Machine& machine) {
  LinearCall call;
  LinearSegment segment;
  const at::Tensor& x = rows_of(arguments[0], call);
  set_segment(segment, arguments[1], count > 2 ? arguments[2] : nullptr, call);
  if (count > 3) {
    const at::Tensor& residual = dense_of(arguments[3], 2);
    require(residual.size(0) == call.rows && residual.size(1) == segment.outputs);
    segment.residual = floats(residual);
  }
  at::Tensor out = new_out(segment, call, x);
  call.segments = &segment;
  call.count = 1;
  run_linear(call, machine);
  return wrap(std::move(out));
}

constexpr Py_ssize_t kMostSegments = 8;

PyObject* run_linear_group(Arguments arguments, Py_ssize_t, const Machine& machine) {
  PyObject *weights = arguments[1], *biases = arguments[2];
  require(PyTuple_CheckExact(weights) && PyTuple_CheckExact(biases));
  const Py_ssize_t count = PyTuple_GET_SIZE(weights);
  require(count > 0 && count <= kMostSegments && PyTuple_GET_SIZE(biases) == count);
  LinearCall call;
  std::array<LinearSegment, kMostSegments> segments;
  std::array<at::Tensor, kMostSegments> outs;
  const at::Tensor& x = rows_of(arguments[0], call);
  for (Py_ssize_t i = 0; i < count; ++i) {
    set_segment(segments[i], PyTuple_GET_ITEM(weights, i), PyTuple_GET_ITEM(biases, i), call);
    outs[i] = new_out(segments[i], call, x);
  }
  call.segments = segments.data();
  call.count = static_cast<int>(count);
  run_linear(call, machine);
  PyObject* result = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(result, i, wrap(std::move(outs[i])));
  return result;
}

PyObject* run_gated_mlp_in(Arguments arguments, Py_ssize_t count, const Machine& machine) {
  LinearCall call;
  LinearSegment segments[2];
  const at::Tensor& x = rows_of(arguments[0], call);
  for (int i = 0; i < 2; ++i) {
    set_segment(segments[i], arguments[1 + i], count > 3 + i ? arguments[3 + i] : nullptr, call);
  }
  require(segments[0].outputs == segments[1].outputs);
  at::Tensor out = new_out(segments[0], call, x);
  call.segments = segments;
  call.count = 2;
  call.gated = true;
  run_linear(call, machine);
  return wrap(std::move(out));
}

PyObject* run_norm(NormCall& call, const at::Tensor& x, PyObject* weight, PyObject* epsilon,
                   at::Tensor sum) {
  call.x = floats(x);
  call.rows = x.size(0);
  call.width = x.size(1);
  require(call.width > 0 && !is_none(weight));
  call.weight = optional_vector(weight, call.width);
  call.epsilon = static_cast<float>(number_of(epsilon));
  call.threads = at::get_num_threads();
  at::Tensor normed = at::empty(x.sizes(), x.options());
  call.normed = normed.mutable_data_ptr<float>();
  rms_norm(call);
  return sum.defined() ? pair(std::move(normed), std::move(sum)) : wrap(std::move(normed));
}

PyObject* run_rms_norm(Arguments arguments, Py_ssize_t, const Machine&) {
  NormCall call;
  return run_norm(call, dense_of(arguments[0], 2), arguments[1], arguments[2], {});
}

PyObject* run_add_rms_norm(Arguments arguments, Py_ssize_t, const Machine&) {
  NormCall call;
  const at::Tensor& x = dense_of(arguments[0], 2);
  const at::Tensor& residual = dense_of(arguments[1], 2);
  require(residual.sizes() == x.sizes());
  at::Tensor sum = at::empty(x.sizes(), x.options());
  call.residual = floats(residual);
  call.sum = sum.mutable_data_ptr<float>();
  return run_norm(call, x, arguments[2], arguments[3], std::move(sum));
}

PyObject* run_greedy(Arguments arguments, Py_ssize_t, const Machine&) {
  const at::Tensor& logits = dense_of(arguments[0], 2);
  require(logits.size(1) > 0);
  at::Tensor ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  at::Tensor log_probabilities = at::empty({logits.size(0)}, logits.options());
  GreedyCall call;
  call.logits = floats(logits);
  call.rows = logits.size(0);
  call.width = logits.size(1);
  call.ids = ids.mutable_data_ptr<std::int64_t>();
  call.log_probabilities = log_probabilities.mutable_data_ptr<float>();
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    greedy(call);
  }
  return pair(std::move(ids), std::move(log_probabilities));
}

PyObject* run_rotary(Arguments arguments, Py_ssize_t, const Machine&) {
  const at::Tensor &q = heads_of(arguments[0]), &k = heads_of(arguments[1]);
  require(q.size(0) == k.size(0) && q.size(2) == k.size(2));
  RotaryCall call;
  call.q = floats(q);
  call.k = floats(k);
  call.q_stride = q.stride(0);
  call.k_stride = k.stride(0);
  call.tokens = q.size(0);
  call.heads = q.size(1);
  call.kv_heads = k.size(1);
  call.channels = q.size(2);
  call.rotation = rotation_of(arguments + 2, call.tokens, call.channels);
  check_positions(call.rotation, call.tokens);
  at::Tensor q_out = at::empty(q.sizes(), q.options()), k_out = at::empty(k.sizes(), k.options());
  call.q_out = q_out.mutable_data_ptr<float>();
  call.k_out = k_out.mutable_data_ptr<float>();
  call.threads = at::get_num_threads();
  rotary(call);
  return pair(std::move(q_out), std::move(k_out));
}

constexpr Operation kOperations[] = {
    {"linear", 2, 3, run_linear_one},
    {"linear_add", 4, 4, run_linear_one},
    {"linear_group", 3, 3, run_linear_group},
    {"gated_mlp_in", 3, 5, run_gated_mlp_in},
    {"rms_norm", 3, 3, run_rms_norm},
    {"add_rms_norm", 4, 4, run_add_rms_norm},
    {"greedy", 1, 1, run_greedy},
    {"rotary", 5, 5, run_rotary},
};

}  // namespace

std::span<const Operation> operations() { return kOperations; }

}  // namespace firstlight
