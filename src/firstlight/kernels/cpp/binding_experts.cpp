// Owns how the arguments of experts, gated activations and residual mixing become native calls.
// It refuses to know how anything is computed.
//
// Mxfp4 and Activation are named tuples of the package; their fields are read by position.
#include "binding_calls.hpp"
#include "binding_support.hpp"
#include "experts.hpp"
#include "operations.hpp"
#include "residual_mix.hpp"

namespace firstlight {
namespace {

PyObject* field(PyObject* handle, Py_ssize_t index) {
  require(PyTuple_Check(handle) && PyTuple_GET_SIZE(handle) == 2);
  return PyTuple_GET_ITEM(handle, index);
}

Mxfp4Matrices matrices_of(PyObject* handle) {
  const at::Tensor& packed = dense_of(field(handle, 0), 3, at::kByte);
  const at::Tensor& scale = dense_of(field(handle, 1), 3, at::kByte);
  Mxfp4Matrices matrices;
  matrices.packed = packed.const_data_ptr<std::uint8_t>();
  matrices.scale = scale.const_data_ptr<std::uint8_t>();
  matrices.experts = packed.size(0);
  matrices.rows = packed.size(1);
  matrices.columns = packed.size(2) * 2;
  require(matrices.columns % kGroup == 0 && matrices.rows % kGroup == 0);
  require(scale.size(0) == matrices.experts && scale.size(1) == matrices.rows &&
          scale.size(2) == matrices.columns / kGroup);
  return matrices;
}

GatedActivation activation_of(PyObject* handle) {
  GatedActivation activation;
  activation.bent = !is_none(field(handle, 0));
  if (!activation.bent) return activation;
  activation.beta = static_cast<float>(number_of(field(handle, 0)));
  activation.bends_up = !is_none(field(handle, 1));
  if (activation.bends_up) {
    activation.linear_beta = static_cast<float>(number_of(field(handle, 1)));
  }
  return activation;
}

// How many experts are numbered, and where their matrices stand when that is told.
void set_slots(ExpertsCall& call, PyObject* object) {
  call.experts = call.w1.experts;
  if (object == nullptr || is_none(object)) return;
  const at::Tensor& slots = dense_of(object, 1, at::kLong);
  call.experts = slots.size(0);
  call.slots = slots.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < call.experts; ++i) require(call.slots[i] < call.w1.experts);
}

// experts_mxfp4(x, ids, weights, w1, w3, w2, first, activation, slots=None, total=None)
PyObject* run_experts_mxfp4(Arguments arguments, Py_ssize_t count, const Machine& machine) {
  const at::Tensor& x = dense_of(arguments[0], 2);
  const at::Tensor& ids = dense_of(arguments[1], 2, at::kLong);
  const at::Tensor& shares = dense_of(arguments[2], 2);
  ExpertsCall call;
  call.w1 = matrices_of(arguments[3]);
  call.w3 = matrices_of(arguments[4]);
  call.w2 = matrices_of(arguments[5]);
  call.first = integer_of(arguments[6]);
  call.activation = activation_of(arguments[7]);
  require(ids.size(0) == x.size(0) && shares.sizes() == ids.sizes());
  require(call.w1.columns == x.size(1) && call.w2.rows == x.size(1) &&
          call.w3.columns == x.size(1) && call.w3.rows == call.w1.rows &&
          call.w2.columns == call.w1.rows);
  require(call.w3.experts == call.w1.experts && call.w2.experts == call.w1.experts);
  set_slots(call, count > 8 ? arguments[8] : nullptr);
  if (count > 9 && !is_none(arguments[9])) {
    const at::Tensor& total = dense_of(arguments[9], 2);
    require(total.sizes() == x.sizes());
    call.total = floats(total);
  }
  at::Tensor out = at::empty(x.sizes(), x.options());
  call.x = floats(x);
  call.ids = ids.const_data_ptr<std::int64_t>();
  call.shares = floats(shares);
  call.tokens = x.size(0);
  call.chosen = ids.size(1);
  call.out = out.mutable_data_ptr<float>();
  call.tiles = machine.amx;
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    experts_mxfp4(call);
  }
  return wrap(std::move(out));
}

// gated_activation(gate, up, activation)
PyObject* run_gated_activation(Arguments arguments, Py_ssize_t, const Machine&) {
  const at::Tensor &gate = dense_of(arguments[0], 2), &up = dense_of(arguments[1], 2);
  require(gate.sizes() == up.sizes());
  const GatedActivation activation = activation_of(arguments[2]);
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  activate(floats(gate), floats(up), out.mutable_data_ptr<float>(), gate.numel(), activation,
           at::get_num_threads());
  return wrap(std::move(out));
}

// residual_mix(bank, current, query, epsilon)
PyObject* run_residual_mix(Arguments arguments, Py_ssize_t, const Machine&) {
  const at::Tensor &bank = tensor_of(arguments[0], 3), &current = dense_of(arguments[1], 2);
  ResidualMixCall call;
  call.tokens = current.size(0);
  call.width = current.size(1);
  call.rows = bank.size(1);
  require(call.width > 0 && call.rows < kMostMixedRows && bank.size(0) == call.tokens &&
          bank.size(2) == call.width && (bank.stride(2) == 1 || call.width == 1));
  call.query = optional_vector(arguments[2], call.width);
  require(call.query != nullptr);
  call.epsilon = static_cast<float>(number_of(arguments[3]));
  at::Tensor out = at::empty(current.sizes(), current.options());
  call.bank = floats(bank);
  call.token_stride = bank.stride(0);
  call.row_stride = bank.stride(1);
  call.current = floats(current);
  call.out = out.mutable_data_ptr<float>();
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    residual_mix(call);
  }
  return wrap(std::move(out));
}

constexpr Operation kOperations[] = {
    {"experts_mxfp4", 8, 10, run_experts_mxfp4},
    {"gated_activation", 3, 3, run_gated_activation},
    {"residual_mix", 4, 4, run_residual_mix},
};

}  // namespace

std::span<const Operation> expert_operations() { return kOperations; }

}  // namespace firstlight
