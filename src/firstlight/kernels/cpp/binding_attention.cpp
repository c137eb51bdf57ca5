// Owns how the arguments of attention over pages become native calls: floats or INT8, keys and
// values of heads or latents, whole contexts or segments. It refuses to know how anything is
// computed.
#include <ATen/core/Tensor.h>

#include "attention.hpp"
#include "binding_calls.hpp"
#include "binding_support.hpp"
#include "operations.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kLatentGroup = 64;  // values of a latent row that share a scale

std::uint16_t* halves(const at::Tensor& tensor) {
  return static_cast<std::uint16_t*>(tensor.mutable_data_ptr());
}

void read_query(AttentionCall& call, const at::Tensor& q) {
  call.tokens = q.size(0);
  call.heads = q.size(1);
  call.channels = q.size(2);
  call.q = floats(q);
  call.q_stride = q.stride(0);
}

// New keys and values of heads; None where a segment writes nothing.
void read_new(AttentionCall& call, PyObject* k_object, PyObject* v_object) {
  if (is_none(k_object)) {
    require(is_none(v_object));
    return;
  }
  const at::Tensor &k = heads_of(k_object), &v = heads_of(v_object);
  require(k.size(0) == call.tokens && k.size(1) == call.kv_heads && k.size(2) == call.channels &&
          v.sizes() == k.sizes());
  call.k = floats(k);
  call.v = floats(v);
  call.k_stride = k.stride(0);
  call.v_stride = v.stride(0);
}

void share_heads(AttentionCall& call, std::int64_t kv_heads) {
  call.kv_heads = kv_heads;
  require(kv_heads > 0 && call.heads % kv_heads == 0 && call.heads / kv_heads <= kMostGroup);
}

// keys, key scales, values, value scales.
void read_byte_pages(AttentionCall& call, Arguments arguments) {
  const at::Tensor &keys = dense_of(arguments[0], 4, at::kChar);
  const at::Tensor &values = dense_of(arguments[2], 4, at::kChar);
  const at::Tensor &key_scales = dense_of(arguments[1], 3, at::kHalf);
  const at::Tensor &value_scales = dense_of(arguments[3], 3, at::kHalf);
  require(keys.sizes() == values.sizes() && keys.size(2) > 0 && keys.size(3) == call.channels);
  require(key_scales.sizes() == keys.sizes().slice(0, 3) &&
          value_scales.sizes() == key_scales.sizes());
  share_heads(call, keys.size(1));
  call.bytes.keys = keys.mutable_data_ptr<std::int8_t>();
  call.bytes.values = values.mutable_data_ptr<std::int8_t>();
  call.bytes.key_scales = halves(key_scales);
  call.bytes.value_scales = halves(value_scales);
  call.bytes.group = call.channels;
  call.bytes.spread = true;
  call.pages = keys.size(0);
  call.slots = keys.size(2);
}

// New latent rows, or None; q has been read.
void read_new_rows(AttentionCall& call, PyObject* rows_object) {
  share_heads(call, 1);
  if (is_none(rows_object)) return;
  const at::Tensor& rows = tensor_of(rows_object, 2);
  require(rows.size(0) == call.tokens && rows.size(1) == call.channels &&
          (rows.stride(1) == 1 || call.channels == 1));
  call.k = call.v = floats(rows);
  call.k_stride = call.v_stride = rows.stride(0);
}

void read_latent_pages(AttentionCall& call, PyObject* pages_object, std::int64_t value_channels) {
  const at::Tensor& pages = dense_of(pages_object, 3);
  require(pages.size(1) > 0 && pages.size(2) == call.channels);
  require(value_channels > 0 && value_channels <= call.channels);
  call.value_channels = value_channels;
  call.keys = call.values = pages.mutable_data_ptr<float>();
  call.pages = pages.size(0);
  call.slots = pages.size(1);
}

void read_byte_latents(AttentionCall& call, PyObject* pages_object, PyObject* scales_object,
                       std::int64_t value_channels) {
  const at::Tensor& pages = dense_of(pages_object, 3, at::kChar);
  const at::Tensor& scales = dense_of(scales_object, 3, at::kHalf);
  require(pages.size(1) > 0 && pages.size(2) == call.channels);
  require(value_channels > 0 && value_channels <= call.channels);
  call.value_channels = value_channels;
  call.bytes.group = kLatentGroup;
  require(scales.size(0) == pages.size(0) && scales.size(1) == pages.size(1) &&
          scales.size(2) == call.bytes.groups(call.channels));
  call.bytes.keys = call.bytes.values = pages.mutable_data_ptr<std::int8_t>();
  call.bytes.key_scales = call.bytes.value_scales = halves(scales);
  call.pages = pages.size(0);
  call.slots = pages.size(1);
}

PyObject* attend(AttentionCall& call, const at::TensorOptions& options) {
  check_attention(call);
  at::Tensor out = at::empty({call.tokens, call.heads, call.value_width()}, options);
  call.out = out.mutable_data_ptr<float>();
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    attention_amx(call);
  }
  return wrap(std::move(out));
}

const at::Tensor& carry_of(PyObject* object, const AttentionCall& call) {
  const at::Tensor& carry = dense_of(object, 3);
  require(carry.size(0) == call.tokens && carry.size(1) == call.heads && carry.size(2) > 2);
  return carry;
}

// starts, contexts, firsts, lasts, table, scale, carry; segments must begin and end between blocks.
PyObject* attend_segment(AttentionCall& call, Arguments arguments) {
  constexpr std::int32_t kBlock = 64;
  read_spans(call, arguments[0], arguments[1], arguments[4]);
  const at::Tensor& firsts = dense_of(arguments[2], 1, at::kInt);
  const at::Tensor& lasts = dense_of(arguments[3], 1, at::kInt);
  require(firsts.size(0) == call.sequences && lasts.size(0) == call.sequences);
  call.firsts = firsts.const_data_ptr<std::int32_t>();
  call.lasts = lasts.const_data_ptr<std::int32_t>();
  for (std::int64_t b = 0; b < call.sequences; ++b) {
    require(call.firsts[b] % kBlock == 0 &&
            (call.lasts[b] % kBlock == 0 || call.lasts[b] == call.contexts[b]));
  }
  read_sight(call, arguments + 5, 1);
  const at::Tensor& carry = carry_of(arguments[6], call);
  require(carry.size(2) == call.value_width() + 2);
  call.carry = carry.mutable_data_ptr<float>();
  check_attention(call);
  call.threads = at::get_num_threads();
  {
    const WithoutInterpreterLock unlocked;
    attention_amx(call);
  }
  return wrap(carry);
}

PyObject* run_attention(Arguments arguments, Py_ssize_t count, bool rotated) {
  const at::Tensor& q = heads_of(arguments[0]);
  AttentionCall call;
  read_query(call, q);
  share_heads(call, heads_of(arguments[1]).size(1));
  read_new(call, arguments[1], arguments[2]);
  require(call.k != nullptr);
  if (rotated) call.rotation = rotation_of(arguments + 3, call.tokens, call.channels);
  const int first = rotated ? 6 : 3;
  read_cache(call, arguments + first, count - first);
  return attend(call, q.options());
}

// paged_attention(q, k, v, keys, values, starts, contexts, table, scale, window=None, sinks=0)
PyObject* run_paged_attention(Arguments arguments, Py_ssize_t count, const Machine&) {
  return run_attention(arguments, count, false);
}

// rotary_paged_attention(q, k, v, positions, cos, sin, keys, ... as paged_attention)
PyObject* run_rotary_paged_attention(Arguments arguments, Py_ssize_t count, const Machine&) {
  return run_attention(arguments, count, true);
}

// segment_attention(q, k, v, keys, values, starts, contexts, firsts, lasts, table, scale, carry)
PyObject* run_segment_attention(Arguments arguments, Py_ssize_t, const Machine&) {
  AttentionCall call;
  read_query(call, heads_of(arguments[0]));
  share_heads(call, dense_of(arguments[3], 4).size(1));
  read_new(call, arguments[1], arguments[2]);
  read_pages(call, arguments[3], arguments[4]);
  return attend_segment(call, arguments + 5);
}

// int8_paged_attention(q, k, v, keys, key_scales, values, value_scales, starts, contexts, table,
//                      scale, window=None, sinks=0)
PyObject* run_int8_paged_attention(Arguments arguments, Py_ssize_t count, const Machine&) {
  const at::Tensor& q = heads_of(arguments[0]);
  AttentionCall call;
  read_query(call, q);
  read_byte_pages(call, arguments + 3);
  read_new(call, arguments[1], arguments[2]);
  require(call.k != nullptr);
  read_spans(call, arguments[7], arguments[8], arguments[9]);
  read_sight(call, arguments + 10, count - 10);
  return attend(call, q.options());
}

// int8_segment_attention(q, k, v, keys, key_scales, values, value_scales, starts, contexts, firsts,
//                        lasts, table, scale, carry)
PyObject* run_int8_segment_attention(Arguments arguments, Py_ssize_t, const Machine&) {
  AttentionCall call;
  read_query(call, heads_of(arguments[0]));
  read_byte_pages(call, arguments + 3);
  read_new(call, arguments[1], arguments[2]);
  return attend_segment(call, arguments + 7);
}

// latent_attention(q, rows, pages, starts, contexts, table, scale, value_width, window=None, sinks=0)
PyObject* run_latent_attention(Arguments arguments, Py_ssize_t count, const Machine&) {
  const at::Tensor& q = heads_of(arguments[0]);
  AttentionCall call;
  read_query(call, q);
  read_new_rows(call, arguments[1]);
  require(call.k != nullptr);
  read_latent_pages(call, arguments[2], integer_of(arguments[7]));
  read_spans(call, arguments[3], arguments[4], arguments[5]);
  PyObject* const sight[] = {arguments[6], count > 8 ? arguments[8] : nullptr,
                             count > 9 ? arguments[9] : nullptr};
  read_sight(call, sight, count - 7);
  return attend(call, q.options());
}

// segment_latent_attention(q, rows, pages, starts, contexts, firsts, lasts, table, scale, carry)
PyObject* run_segment_latent_attention(Arguments arguments, Py_ssize_t, const Machine&) {
  AttentionCall call;
  read_query(call, heads_of(arguments[0]));
  read_new_rows(call, arguments[1]);
  read_latent_pages(call, arguments[2], carry_of(arguments[9], call).size(2) - 2);
  return attend_segment(call, arguments + 3);
}

// int8_latent_attention(q, rows, pages, scales, starts, contexts, table, scale, value_width,
//                       window=None, sinks=0)
PyObject* run_int8_latent_attention(Arguments arguments, Py_ssize_t count, const Machine&) {
  const at::Tensor& q = heads_of(arguments[0]);
  AttentionCall call;
  read_query(call, q);
  read_new_rows(call, arguments[1]);
  require(call.k != nullptr);
  read_byte_latents(call, arguments[2], arguments[3], integer_of(arguments[8]));
  read_spans(call, arguments[4], arguments[5], arguments[6]);
  PyObject* const sight[] = {arguments[7], count > 9 ? arguments[9] : nullptr,
                             count > 10 ? arguments[10] : nullptr};
  read_sight(call, sight, count - 8);
  return attend(call, q.options());
}

// int8_segment_latent_attention(q, rows, pages, scales, starts, contexts, firsts, lasts, table,
//                               scale, carry)
PyObject* run_int8_segment_latent_attention(Arguments arguments, Py_ssize_t, const Machine&) {
  AttentionCall call;
  read_query(call, heads_of(arguments[0]));
  read_new_rows(call, arguments[1]);
  read_byte_latents(call, arguments[2], arguments[3], carry_of(arguments[10], call).size(2) - 2);
  return attend_segment(call, arguments + 4);
}

constexpr Operation kOperations[] = {
    {"paged_attention", 9, 11, run_paged_attention},
    {"rotary_paged_attention", 12, 14, run_rotary_paged_attention},
    {"segment_attention", 12, 12, run_segment_attention},
    {"int8_paged_attention", 11, 13, run_int8_paged_attention},
    {"int8_segment_attention", 14, 14, run_int8_segment_attention},
    {"latent_attention", 8, 10, run_latent_attention},
    {"segment_latent_attention", 10, 10, run_segment_latent_attention},
    {"int8_latent_attention", 9, 11, run_int8_latent_attention},
    {"int8_segment_latent_attention", 11, 11, run_int8_segment_latent_attention},
};

}  // namespace

std::span<const Operation> attention_operations() { return kOperations; }

}  // namespace firstlight
