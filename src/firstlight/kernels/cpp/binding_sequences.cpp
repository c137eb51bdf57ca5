// Owns how the arguments of operations with state of sequences become native calls.
// It refuses to know how anything is computed.
#include <vector>

#include "binding_calls.hpp"
#include "binding_support.hpp"
#include "delta_rule.hpp"
#include "operations.hpp"

namespace firstlight {
namespace {

// A vector of int32 or int64.
std::vector<std::int64_t> integers_of(PyObject* object) {
  require(THPVariable_CheckExact(object));
  if (THPVariable_Unpack(object).scalar_type() == at::kLong) {
    const at::Tensor& tensor = dense_of(object, 1, at::kLong);
    const auto* data = tensor.const_data_ptr<std::int64_t>();
    return {data, data + tensor.size(0)};
  }
  const at::Tensor& tensor = dense_of(object, 1, at::kInt);
  const auto* data = tensor.const_data_ptr<std::int32_t>();
  return {data, data + tensor.size(0)};
}

// starts, state, slots and fresh, checked; what contradicts itself goes to the reference.
struct SpanArguments {
  std::vector<std::int64_t> starts, slots;
  Spans spans;
  const at::Tensor* state = nullptr;  // or null: no slots

  SpanArguments(PyObject* starts_object, Arguments rest, Py_ssize_t count, std::int64_t tokens)
      : starts(integers_of(starts_object)) {
    require(!starts.empty() && starts.front() == 0 && starts.back() == tokens);
    for (std::size_t i = 1; i < starts.size(); ++i) require(starts[i - 1] <= starts[i]);
    spans.starts = starts.data();
    spans.sequences = static_cast<std::int64_t>(starts.size()) - 1;
    if (count == 0 || is_none(rest[0])) return;
    require(count == 3);
    require(THPVariable_CheckExact(rest[0]));
    state = &THPVariable_Unpack(rest[0]);
    slots = integers_of(rest[1]);
    const at::Tensor& fresh = dense_of(rest[2], 1, at::kBool);
    require(static_cast<std::int64_t>(slots.size()) == spans.sequences &&
            fresh.size(0) == spans.sequences);
    spans.slots = slots.data();
    spans.fresh = fresh.const_data_ptr<bool>();
  }

  // The state's memory: slots of rows of `sizes`, dense but for the slots.
  float* memory(at::IntArrayRef sizes) const {
    require(state->device().is_cpu() && state->layout() == at::kStrided &&
            state->scalar_type() == at::kFloat && !state->requires_grad());
    require(state->dim() == static_cast<std::int64_t>(sizes.size()) + 1 &&
            state->sizes().slice(1) == sizes);
    std::int64_t stride = 1;
    for (std::int64_t dim = state->dim() - 1; dim > 0; --dim) {
      require(state->size(dim) == 1 || state->stride(dim) == stride);
      stride *= state->size(dim);
    }
    for (const std::int64_t slot : slots) require(slot >= 0 && slot < state->size(0));
    return state->mutable_data_ptr<float>();
  }
};

// delta_rule(q, k, v, decay, beta, starts, matrices=None, slots=None, fresh=None)
PyObject* run_delta_rule(Arguments arguments, Py_ssize_t count, const Machine&) {
  const at::Tensor &q = heads_of(arguments[0]), &k = heads_of(arguments[1]);
  const at::Tensor &v = heads_of(arguments[2]), &decay = heads_of(arguments[3]);
  const at::Tensor& beta = tensor_of(arguments[4], 2);
  require(q.sizes() == k.sizes() && q.sizes() == decay.sizes());
  require(v.size(0) == q.size(0) && v.size(1) == q.size(1));
  require(beta.size(0) == q.size(0) && beta.size(1) == q.size(1) &&
          (beta.stride(1) == 1 || beta.size(1) == 1));
  const SpanArguments given(arguments[5], arguments + 6, count - 6, q.size(0));
  DeltaCall call;
  call.q = floats(q);
  call.k = floats(k);
  call.v = floats(v);
  call.decay = floats(decay);
  call.beta = floats(beta);
  call.q_stride = q.stride(0);
  call.k_stride = k.stride(0);
  call.v_stride = v.stride(0);
  call.decay_stride = decay.stride(0);
  call.beta_stride = beta.stride(0);
  call.heads = q.size(1);
  call.keys = q.size(2);
  call.values = v.size(2);
  call.spans = given.spans;
  if (given.state != nullptr) {
    call.matrices = given.memory({call.heads, call.keys, call.values});
    call.slot_stride = given.state->stride(0);
  }
  at::Tensor out = at::empty(v.sizes(), v.options());
  call.out = out.mutable_data_ptr<float>();
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    delta_rule(call);
  }
  return wrap(std::move(out));
}

// short_conv(x, weight, starts, inputs=None, slots=None, fresh=None)
PyObject* run_short_conv(Arguments arguments, Py_ssize_t count, const Machine&) {
  const at::Tensor &x = dense_of(arguments[0], 2), &weight = dense_of(arguments[1], 3);
  ConvolutionCall call;
  call.channels = x.size(1);
  call.taps = weight.size(2);
  require(weight.size(0) == call.channels && weight.size(1) == 1 && call.channels > 0 &&
          call.taps > 0 && call.taps <= kMostTaps);
  const SpanArguments given(arguments[2], arguments + 3, count - 3, x.size(0));
  call.spans = given.spans;
  call.x = floats(x);
  call.weight = floats(weight);
  if (given.state != nullptr) {
    call.inputs = given.memory({call.taps - 1, call.channels});
    call.slot_stride = given.state->stride(0);
  }
  at::Tensor out = at::empty(x.sizes(), x.options());
  call.out = out.mutable_data_ptr<float>();
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    short_conv(call);
  }
  return wrap(std::move(out));
}

constexpr Operation kOperations[] = {
    {"delta_rule", 6, 9, run_delta_rule},
    {"short_conv", 3, 6, run_short_conv},
};

}  // namespace

std::span<const Operation> sequence_operations() { return kOperations; }

}  // namespace firstlight
