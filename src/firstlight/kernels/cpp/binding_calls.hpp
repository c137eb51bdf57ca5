// Owns how arguments that several operations share become parts of native calls.
// It refuses to know which operation is called.
#pragma once
#include <algorithm>

#include "attention.hpp"
#include "binding_support.hpp"
#include "fused.hpp"
#include "linear.hpp"

namespace firstlight {

constexpr std::int64_t kVectorRowsAlone = 32;  // without tiles, beyond this MKL is better

inline void run_linear(LinearCall& call, const Machine& machine) {
  call.threads = at::get_num_threads();
  require(machine.amx || call.rows <= kVectorRowsAlone);
  const WithoutInterpreterLock unlocked;
  if (machine.amx && call.rows > kVectorRows) {
    linear_amx(call);
  } else {
    linear_avx512(call);
  }
}

inline const at::Tensor& rows_of(PyObject* object, LinearCall& call) {
  const at::Tensor& x = tensor_of(object, 2);
  require(x.size(1) > 0 && (x.stride(1) == 1 || x.size(1) == 1));
  call.x = floats(x);
  call.x_stride = x.stride(0);
  call.rows = x.size(0);
  call.inputs = x.size(1);
  return x;
}

inline void set_segment(LinearSegment& segment, PyObject* weight_object, PyObject* bias,
                 const LinearCall& call) {
  const at::Tensor& weight = dense_of(weight_object, 2);
  require(weight.size(1) == call.inputs);
  segment.weight = Weight(floats(weight), WeightFormat::float32, call.inputs);
  segment.outputs = weight.size(0);
  segment.bias = optional_vector(bias, segment.outputs);
}

inline at::Tensor new_out(LinearSegment& segment, const LinearCall& call, const at::Tensor& x) {
  at::Tensor out = at::empty({call.rows, segment.outputs}, x.options());
  segment.out = out.mutable_data_ptr<float>();
  return out;
}

inline double number_of(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    throw NotTaken{};
  }
  return value;
}

inline std::int64_t integer_of(PyObject* object) {
  const std::int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    throw NotTaken{};
  }
  return value;
}

// Heads of tokens whose channels and heads are dense; tokens may be further apart.
inline const at::Tensor& heads_of(PyObject* object) {
  const at::Tensor& x = tensor_of(object, 3);
  require(x.size(2) > 0 && x.size(1) > 0);
  require(x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)));
  return x;
}

// positions, cos and sin.
inline Rotation rotation_of(Arguments arguments, std::int64_t tokens, std::int64_t channels) {
  const at::Tensor& positions = dense_of(arguments[0], 1, at::kLong);
  const at::Tensor &cos = dense_of(arguments[1], 2), &sin = dense_of(arguments[2], 2);
  require(positions.size(0) == tokens && cos.sizes() == sin.sizes());
  require(cos.size(1) > 0 && 2 * cos.size(1) <= channels);
  Rotation rotation;
  rotation.positions = positions.const_data_ptr<std::int64_t>();
  rotation.cos = floats(cos);
  rotation.sin = floats(sin);
  rotation.table_rows = cos.size(0);
  rotation.pairs = cos.size(1);
  return rotation;
}

constexpr std::int64_t kMostGroup = 128;  // query heads of one key/value head

// starts, contexts and table.
inline void read_spans(AttentionCall& call, PyObject* starts_object, PyObject* contexts_object,
                       PyObject* table_object) {
  const at::Tensor& starts = dense_of(starts_object, 1, at::kInt);
  const at::Tensor& contexts = dense_of(contexts_object, 1, at::kInt);
  const at::Tensor& table = dense_of(table_object, 2, at::kInt);
  call.sequences = contexts.size(0);
  require(starts.size(0) == call.sequences + 1 && table.size(0) == call.sequences);
  call.starts = starts.const_data_ptr<std::int32_t>();
  call.contexts = contexts.const_data_ptr<std::int32_t>();
  call.table = table.const_data_ptr<std::int32_t>();
  call.table_width = table.size(1);
}

// From the scale on: scale, window, sinks.
inline void read_sight(AttentionCall& call, Arguments arguments, Py_ssize_t count) {
  call.scale = static_cast<float>(number_of(arguments[0]));
  if (count > 1 && !is_none(arguments[1])) {
    call.window = std::min<std::int64_t>(integer_of(arguments[1]), call.window);
    require(call.window > 0);
  }
  if (count > 2) {
    call.sinks = integer_of(arguments[2]);
    require(call.sinks >= 0);
  }
}

inline void read_pages(AttentionCall& call, PyObject* keys_object, PyObject* values_object) {
  const at::Tensor &keys = dense_of(keys_object, 4), &values = dense_of(values_object, 4);
  require(keys.sizes() == values.sizes() && keys.size(1) == call.kv_heads && keys.size(2) > 0 &&
          keys.size(3) == call.channels);
  call.keys = keys.mutable_data_ptr<float>();
  call.values = values.mutable_data_ptr<float>();
  call.pages = keys.size(0);
  call.slots = keys.size(2);
}

// From the pages on: keys, values, starts, contexts, table, scale, window, sinks.
inline void read_cache(AttentionCall& call, Arguments arguments, Py_ssize_t count) {
  read_pages(call, arguments[0], arguments[1]);
  read_spans(call, arguments[2], arguments[3], arguments[4]);
  read_sight(call, arguments + 5, count - 5);
}

}  // namespace firstlight
