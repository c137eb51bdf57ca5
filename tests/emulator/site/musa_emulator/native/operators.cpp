#include "operators.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "device.hpp"
#include "graph.hpp"
#include "memory.hpp"
#include "rules.hpp"
#include "timeline.hpp"

namespace emulated {

namespace {

// Indices may lie on the host; the size of the result of these is known only on the device.
const std::set<std::string> kHostIndices{"aten::index", "aten::index_put_", "aten::index_put",
                                         "aten::_index_put_impl_"};
const std::set<std::string> kWaiting{"aten::nonzero", "aten::masked_select", "aten::unique_dim",
                                     "aten::_unique2", "aten::unique_consecutive"};

struct Pair {
  at::Tensor ours;
  at::Tensor host;
  bool output;
  bool replaced;  // an empty output: its values are made elsewhere and brought back
};

// One call of an operator: its tensors on the device, their twins over the same memory on the CPU.
class Invocation {
 public:
  Invocation(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void run();

 private:
  void find_device();
  void see(const at::Tensor& tensor);
  void check() const;
  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument);
  at::Tensor twin(const at::Tensor& tensor, bool output);
  c10::IValue to_device(const c10::IValue& value);
  at::Tensor bring_back(const at::Tensor& tensor);
  void note_races(StreamKey stream) const;
  void note_writes(StreamKey stream, uint64_t number) const;
  void compute();

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  c10::Device device_{kDeviceType, -1};
  std::vector<Pair> pairs_;
  std::vector<c10::ScalarType> dtypes_;
  std::vector<at::Tensor> made_;
  bool waits_ = false;
};

void Invocation::see(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  const bool scalar = tensor.is_cpu() && tensor.dim() == 0;
  if (!scalar) {
    dtypes_.push_back(tensor.scalar_type());
  }
  if (!is_ours(tensor)) {
    TORCH_CHECK(scalar || kHostIndices.count(schema_.name()) != 0,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                "musa and ", tensor.device(), "! (when checking ", schema_.name(), ")");
    return;
  }
  TORCH_CHECK(device_.index() < 0 || device_ == tensor.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              device_, " and ", tensor.device(), "! (when checking ", schema_.name(), ")");
  device_ = tensor.device();
}

void Invocation::find_device() {
  const auto arguments = torch::jit::last(*stack_, schema_.arguments().size());
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        see(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        see(tensor.value_or(at::Tensor()));
      }
    } else if (value.isDevice() && device_.index() < 0 && value.toDevice().has_index()) {
      device_ = value.toDevice();
    }
  }
  if (device_.index() < 0) {
    device_ = {kDeviceType, static_cast<c10::DeviceIndex>(current_device())};
  }
}

void Invocation::check() const {
  if (const auto reason = refusal(schema_.name(), dtypes_)) {
    TORCH_CHECK(false, *reason);
  }
}

at::Tensor Invocation::twin(const at::Tensor& tensor, bool output) {
  if (!tensor.defined() || !is_ours(tensor)) {
    return tensor;
  }
  const bool replaced = output && tensor.numel() == 0;
  auto host = replaced ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                       : on_host(tensor);
  pairs_.push_back({tensor, host, output, replaced});
  return host;
}

c10::IValue Invocation::to_host(const c10::IValue& value, const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  const bool output = alias != nullptr && alias->isWrite();
  if (value.isTensor()) {
    return twin(value.toTensor(), output);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> twins;
    for (const at::Tensor& tensor : value.toTensorList()) {
      twins.push_back(twin(tensor, output));
    }
    return twins;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> twins;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      twins.push_back(tensor ? std::make_optional(twin(*tensor, false)) : std::nullopt);
    }
    return twins;
  }
  return value.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : value;
}

// The host's view of a twin, as a view of ours: same place, sizes and, for complex views, dtype.
at::Tensor view_of(const at::Tensor& ours, const at::Tensor& host) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), host.dtype());
  const auto bytes = ours.storage_offset() * static_cast<int64_t>(ours.itemsize());
  const auto offset = host.storage_offset() + bytes / static_cast<int64_t>(host.itemsize());
  at::native::setStrided(view, host.sizes(), host.strides(), offset);
  return view;
}

at::Tensor Invocation::bring_back(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  for (const auto& pair : pairs_) {
    if (pair.host.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) {
      return pair.ours;
    }
    if (!pair.replaced && pair.host.storage().unsafeGetStorageImpl() ==
                              tensor.storage().unsafeGetStorageImpl()) {
      return view_of(pair.ours, tensor);
    }
  }
  const auto plain = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  auto ours = empty_strided(plain.sizes(), plain.strides(), plain.scalar_type(), device_);
  std::memcpy(ours.data_ptr(), plain.data_ptr(), plain.nbytes());
  made_.push_back(ours);
  return ours;
}

c10::IValue Invocation::to_device(const c10::IValue& value) {
  if (value.isTensor()) {
    return bring_back(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> back;
    for (const at::Tensor& tensor : value.toTensorList()) {
      back.push_back(bring_back(tensor));
    }
    return back;
  }
  waits_ = true;  // a number or a truth value: the host has waited for it
  return value;
}

void Invocation::note_races(StreamKey stream) const {
  auto& memory = DeviceMemory::get();
  for (const auto& pair : pairs_) {
    const void* pointer = pair.ours.numel() != 0 ? pair.ours.data_ptr() : nullptr;
    if (memory.is_stale(pointer, stream)) {
      Timeline::get().note_race(schema_.name() +
                                " used memory that another stream had not finished");
    } else if (pair.output && memory.is_awaited(pointer, stream)) {
      Timeline::get().note_race(schema_.name() + " wrote memory that a late copy still needs");
    }
  }
}

void Invocation::note_writes(StreamKey stream, uint64_t number) const {
  for (const auto& tensor : made_) {
    DeviceMemory::get().wrote(tensor.data_ptr(), stream, number);
  }
  for (const auto& pair : pairs_) {
    if (pair.output) {
      DeviceMemory::get().wrote(pair.ours.data_ptr(), stream, number);
    }
  }
}

// mm and its like with an out_dtype have no CPU kernel: the plain product, then another type.
void widen(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto position = *schema.argumentIndexWithName("out_dtype");
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto dtype = arguments[position].toScalarType();
  arguments.erase(arguments.begin() + position);
  for (auto& value : arguments) {
    if (value.isTensor()) {
      value = value.toTensor().to(dtype);
    }
  }
  const auto plain = c10::Dispatcher::singleton().findSchemaOrThrow(schema.name().c_str(), "");
  plain.callBoxed(&arguments);
  torch::jit::push(*stack, arguments[0]);
}

void Invocation::compute() {
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  if (schema_.overload_name() == "dtype") {
    widen(op_, stack_);
  } else {
    op_.redispatchBoxed(keys, stack_);
  }
  if (!returns_garbage(schema_.name(), schema_.overload_name(), dtypes_)) {
    return;
  }
  for (auto& value : torch::jit::last(*stack_, schema_.returns().size())) {
    auto tensor = value.toTensor();
    std::memset(tensor.data_ptr(), 0x5a, tensor.nbytes());
  }
}

void Invocation::run() {
  find_device();
  check();
  const c10::DeviceGuard guard(device_);
  auto& timeline = Timeline::get();
  waits_ = kWaiting.count(schema_.name()) != 0;
  if (waits_) {
    timeline.forbid_in_capture(schema_.name().c_str());
  }
  const auto stream = key_of(current_stream(device_.index()));
  const auto number = timeline.launch(stream);
  const size_t num_arguments = schema_.arguments().size();
  torch::jit::Stack kept(stack_->end() - num_arguments, stack_->end());
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = torch::jit::peek(*stack_, i, num_arguments);
    value = to_host(value, schema_.arguments()[i]);
  }
  note_races(stream);
  compute();
  for (auto& pair : pairs_) {
    if (pair.replaced && pair.host.numel() != 0) {
      pair.ours.resize_(pair.host.sizes());
      on_host(pair.ours).copy_(pair.host);
    }
  }
  const size_t num_results = schema_.returns().size();
  for (size_t i = 0; i < num_results; ++i) {
    auto& value = torch::jit::peek(*stack_, i, num_results);
    value = to_device(value);
  }
  note_writes(stream, number);
  Graph::note(op_, std::move(kept), {stack_->end() - num_results, stack_->end()});
  if (waits_) {
    wait_for_results(device_);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Invocation(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kDeviceType; }

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype,
                         c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype);
}

}  // namespace emulated
