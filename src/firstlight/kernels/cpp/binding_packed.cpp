// Owns how the handles of packed modules and their tensors become native calls.
// It refuses to know how anything is computed.
//
// Handles are the named tuples of kernels/packed_weight.py; their fields are read by position.
#include <cstring>
#include <stdexcept>
#include <string>

#include "binding_calls.hpp"
#include "fused.hpp"
#include "operations.hpp"
#include "packing.hpp"

namespace firstlight {
namespace {

PyObject* field(PyObject* handle, Py_ssize_t index, Py_ssize_t fields) {
  require(PyTuple_Check(handle) && PyTuple_GET_SIZE(handle) == fields);
  return PyTuple_GET_ITEM(handle, index);
}

WeightFormat format_of(PyObject* name_object) {
  require(PyUnicode_Check(name_object));
  const char* name = PyUnicode_AsUTF8(name_object);
  require(name != nullptr);
  if (std::strcmp(name, "affine4") == 0) return WeightFormat::affine4;
  if (std::strcmp(name, "scaled8") == 0) return WeightFormat::scaled8;
  if (std::strcmp(name, "bfloat16") == 0) return WeightFormat::bfloat16;
  require(std::strcmp(name, "float32") == 0);
  return WeightFormat::float32;
}

struct Matrix {
  Weight weight;
  std::int64_t rows, columns;
};

// A PackedWeight: format, rows, columns, data.
Matrix matrix_of(PyObject* packed) {
  const WeightFormat format = format_of(field(packed, 0, 4));
  Matrix matrix{{}, integer_of(field(packed, 1, 4)), integer_of(field(packed, 2, 4))};
  const bool dense = format == WeightFormat::float32;
  require(matrix.columns > 0 && (dense || matrix.columns % kBlock == 0));
  const at::Tensor& data = dense_of(field(packed, 3, 4), 2, dense ? at::kFloat : at::kByte);
  matrix.weight = Weight(data.const_data_ptr(), format, matrix.columns);
  require(data.size(0) == matrix.rows && data.nbytes() == static_cast<std::size_t>(
                                             matrix.rows * matrix.weight.row_bytes));
  return matrix;
}

void set_packed(LinearSegment& segment, PyObject* packed, PyObject* bias, const LinearCall& call) {
  const Matrix matrix = matrix_of(packed);
  require(matrix.columns == call.inputs);
  segment.weight = matrix.weight;
  segment.outputs = matrix.rows;
  segment.bias = optional_vector(bias, segment.outputs);
}

// pack_weight_as(weight, format) -> bytes, or None when a value would change.
PyObject* run_pack_weight_as(Arguments arguments, Py_ssize_t, const Machine&) {
  const at::Tensor& weight = dense_of(arguments[0], 2);
  const WeightFormat format = format_of(arguments[1]);
  const std::int64_t rows = weight.size(0), columns = weight.size(1);
  require(format != WeightFormat::float32 && columns > 0);
  if (columns % kBlock != 0) return Py_NewRef(Py_None);
  at::Tensor data =
      at::empty({rows, row_bytes_of(format, columns)}, weight.options().dtype(at::kByte));
  const int threads = at::get_num_threads();
  bool fits = false;
  {
    const WithoutInterpreterLock unlocked;
    fits = pack_weight(floats(weight), rows, columns, format, data.mutable_data_ptr<std::uint8_t>(),
                       threads);
  }
  return fits ? wrap(std::move(data)) : Py_NewRef(Py_None);
}

// packed_rows(weight, ids) -> [ids, columns]
PyObject* run_packed_rows(Arguments arguments, Py_ssize_t, const Machine&) {
  const Matrix matrix = matrix_of(arguments[0]);
  const at::Tensor& ids = dense_of(arguments[1], 1, at::kLong);
  const auto* list = ids.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < ids.size(0); ++i) {
    if (list[i] < 0 || list[i] >= matrix.rows) {
      throw std::out_of_range("row " + std::to_string(list[i]) + " is outside the " +
                              std::to_string(matrix.rows) + " rows of the weight");
    }
  }
  at::Tensor out = at::empty({ids.size(0), matrix.columns}, ids.options().dtype(at::kFloat));
  const int threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    decode_rows(matrix.weight, matrix.columns, list, ids.size(0), out.mutable_data_ptr<float>(),
                threads);
  }
  return wrap(std::move(out));
}

// packed_linear(x, weight, bias=None)
PyObject* run_packed_linear(Arguments arguments, Py_ssize_t count, const Machine&) {
  LinearCall call;
  LinearSegment segment;
  const at::Tensor& x = rows_of(arguments[0], call);
  set_packed(segment, arguments[1], count > 2 ? arguments[2] : nullptr, call);
  at::Tensor out = new_out(segment, call, x);
  call.segments = &segment;
  call.count = 1;
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    linear_any(call);
  }
  return wrap(std::move(out));
}

// packed_mlp(x, (gate, up, down, gate_bias, up_bias, down_bias))
PyObject* run_packed_mlp(Arguments arguments, Py_ssize_t, const Machine&) {
  constexpr Py_ssize_t kFields = 6;
  PyObject* handle = arguments[1];
  MlpCall call;
  LinearSegment gated[2], down;
  const at::Tensor& x = rows_of(arguments[0], call.gated);
  for (int i = 0; i < 2; ++i) {
    set_packed(gated[i], field(handle, i, kFields), field(handle, 3 + i, kFields), call.gated);
  }
  require(gated[0].outputs == gated[1].outputs && gated[0].outputs > 0);
  call.gated.segments = gated;
  call.gated.count = 2;
  call.gated.gated = true;
  call.gated.threads = call.down.threads = at::get_num_threads();
  const at::Tensor inner = new_out(gated[0], call.gated, x);
  call.down.x = gated[0].out;
  call.down.x_stride = call.down.inputs = gated[0].outputs;
  call.down.rows = call.gated.rows;
  set_packed(down, field(handle, 2, kFields), field(handle, 5, kFields), call.down);
  at::Tensor out = new_out(down, call.down, x);
  call.down.segments = &down;
  call.down.count = 1;
  {
    const WithoutInterpreterLock unlocked;
    packed_mlp(call);
  }
  return wrap(std::move(out));
}

// Fields of a PackedAttention.
enum AttentionField : Py_ssize_t {
  kQ, kK, kV, kO, kQBias, kKBias, kVBias, kOBias, kQNorm, kKNorm, kEpsilon, kChannels, kScale,
  kWindow, kCos, kSin, kAttentionFields
};

// Where queries, keys, values and the attended rows stand in one block of scratch.
void place_heads(AttentionModuleCall& call, LinearSegment (&segments)[3], float* scratch) {
  AttentionCall& attention = call.attention;
  for (LinearSegment& segment : segments) {
    segment.out = scratch;
    scratch += attention.tokens * segment.outputs;
  }
  attention.q = call.q = segments[0].out;
  attention.k = call.k = segments[1].out;
  attention.v = segments[2].out;
  attention.q_stride = segments[0].outputs;
  attention.k_stride = attention.v_stride = segments[1].outputs;
  attention.out = scratch;
}

void read_heads(AttentionModuleCall& call, const LinearSegment (&segments)[3], PyObject* handle) {
  AttentionCall& attention = call.attention;
  const auto get = [&](Py_ssize_t index) { return field(handle, index, kAttentionFields); };
  attention.tokens = call.project.rows;
  attention.channels = integer_of(get(kChannels));
  require(attention.channels > 0 && segments[0].outputs % attention.channels == 0 &&
          segments[1].outputs % attention.channels == 0 && segments[1].outputs > 0 &&
          segments[1].outputs == segments[2].outputs);
  attention.heads = segments[0].outputs / attention.channels;
  attention.kv_heads = segments[1].outputs / attention.channels;
  require(attention.heads > 0 && attention.heads % attention.kv_heads == 0 &&
          attention.heads / attention.kv_heads <= kMostGroup);
  call.q_norm = optional_vector(get(kQNorm), attention.channels);
  call.k_norm = optional_vector(get(kKNorm), attention.channels);
  if (call.q_norm || call.k_norm) call.epsilon = static_cast<float>(number_of(get(kEpsilon)));
}

// packed_attention(x, handle, positions, keys, values, starts, contexts, table)
PyObject* run_packed_attention(Arguments arguments, Py_ssize_t, const Machine&) {
  PyObject* handle = arguments[1];
  const auto get = [&](Py_ssize_t index) { return field(handle, index, kAttentionFields); };
  AttentionModuleCall call;
  LinearSegment segments[3], output;
  const at::Tensor& x = rows_of(arguments[0], call.project);
  for (int i = 0; i < 3; ++i) set_packed(segments[i], get(kQ + i), get(kQBias + i), call.project);
  read_heads(call, segments, handle);
  AttentionCall& attention = call.attention;
  if (!is_none(get(kCos))) {
    PyObject* angles[] = {arguments[2], get(kCos), get(kSin)};
    attention.rotation = rotation_of(angles, attention.tokens, attention.channels);
  }
  PyObject* cache[] = {arguments[3], arguments[4], arguments[5], arguments[6],
                       arguments[7], get(kScale),  get(kWindow)};
  read_cache(attention, cache, 7);
  check_attention(attention);
  const std::int64_t width = 2 * segments[0].outputs + 2 * segments[1].outputs;
  const at::Tensor scratch = at::empty({attention.tokens, width}, x.options());
  place_heads(call, segments, scratch.mutable_data_ptr<float>());
  call.output.x = attention.out;
  call.output.x_stride = call.output.inputs = segments[0].outputs;
  call.output.rows = attention.tokens;
  set_packed(output, get(kO), get(kOBias), call.output);
  at::Tensor out = new_out(output, call.output, x);
  call.project.segments = segments;
  call.project.count = 3;
  call.output.segments = &output;
  call.output.count = 1;
  call.project.threads = call.output.threads = attention.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    packed_attention(call);
  }
  return wrap(std::move(out));
}

constexpr Operation kOperations[] = {
    {"pack_weight_as", 2, 2, run_pack_weight_as},
    {"packed_rows", 2, 2, run_packed_rows},
    {"packed_linear", 2, 3, run_packed_linear},
    {"packed_mlp", 2, 2, run_packed_mlp},
    {"packed_attention", 8, 8, run_packed_attention},
};

}  // namespace

std::span<const Operation> packed_operations() { return kOperations; }

}  // namespace firstlight
