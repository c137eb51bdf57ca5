// The operators that need no arithmetic: making tensors, views of them, their storage, and copies.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "device.hpp"
#include "graph.hpp"
#include "memory.hpp"
#include "operators.hpp"

namespace emulated {

namespace {

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device> device,
                               std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDeviceType, current_device())));
  return at::detail::empty_generic(sizes, &DeviceMemory::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_with_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                              std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                              std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided(sizes, strides, c10::dtype_or_default(dtype),
                       device.value_or(c10::Device(kDeviceType, current_device())));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  copy_values(source, target, non_blocking);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_copy_from", "");
  Graph::note(op, {source, target, non_blocking}, {target});
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  copy_values(source, target, false);
  return target;
}

at::Tensor strided(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                   std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  at::native::setStrided(view, sizes, strides, offset.value_or(tensor.storage_offset()));
  return view;
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  const auto wanted = at::infer_size_dv(sizes, tensor.numel());
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), wanted);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and ",
              "stride; use reshape instead");
  return strided(tensor, wanted, *strides, std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides) {
  return strided(tensor, sizes, strides, std::nullopt);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  int64_t elements = 1;
  for (const auto size : sizes) {
    elements *= size;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = (elements + tensor.storage_offset()) * tensor.itemsize();
  if (bytes > storage->nbytes()) {
    const c10::DeviceGuard guard(tensor.device());
    auto fresh = DeviceMemory::get().allocate(bytes);
    if (storage->nbytes() != 0) {
      std::memcpy(fresh.get(), storage->data(), storage->nbytes());
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  strides.empty() ? impl->set_sizes_contiguous(sizes)
                  : impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  wait_for_results(tensor.device());
  return on_host(tensor).item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  DeviceMemory::get().recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_with_strides);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("as_strided", strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

}  // namespace

}  // namespace emulated
