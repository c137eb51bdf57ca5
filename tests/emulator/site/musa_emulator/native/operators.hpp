// Owns how an operator on emulated tensors is computed: by the CPU's kernel on the same memory, in
// the order of the current stream. Knows no model and no dtype that is forbidden: see rules.hpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace emulated {

bool is_ours(const at::Tensor& tensor);
// A CPU tensor over the same memory; a tensor that is not ours comes back as it is.
at::Tensor on_host(const at::Tensor& tensor);
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype,
                         c10::Device device);
// Copies bytes or values; late when it may be and the caller asked for it.
void copy_values(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
// The operator waited for the stream's results: the host knows them now.
void wait_for_results(c10::Device device);

}  // namespace emulated
