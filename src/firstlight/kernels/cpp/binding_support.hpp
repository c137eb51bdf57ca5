// Owns how Python arguments become plain pointers: which tensors the native kernels take.
// It refuses to know any operation.
#pragma once
#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <utility>

#include "operations.hpp"

namespace firstlight {

inline void require(bool taken) {
  if (!taken) throw NotTaken{};
}

// A plain, dense, CPU tensor of the dtype and number of dimensions that needs no gradient.
inline const at::Tensor& tensor_of(PyObject* object, int dims,
                                   at::ScalarType dtype = at::ScalarType::Float) {
  require(THPVariable_CheckExact(object));
  const at::Tensor& tensor = THPVariable_Unpack(object);
  require(tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
          tensor.scalar_type() == dtype && tensor.dim() == dims &&
          !(tensor.requires_grad() && at::GradMode::is_enabled()) && !tensor.is_conj() &&
          !tensor.is_neg());
  return tensor;
}

inline const at::Tensor& dense_of(PyObject* object, int dims,
                                  at::ScalarType dtype = at::ScalarType::Float) {
  const at::Tensor& tensor = tensor_of(object, dims, dtype);
  require(tensor.is_contiguous());
  return tensor;
}

inline bool is_none(PyObject* object) { return object == nullptr || object == Py_None; }

inline const float* floats(const at::Tensor& tensor) { return tensor.const_data_ptr<float>(); }

inline const float* optional_vector(PyObject* object, std::int64_t size) {
  if (is_none(object)) return nullptr;
  const at::Tensor& tensor = dense_of(object, 1);
  require(tensor.size(0) == size);
  return floats(tensor);
}

inline PyObject* wrap(at::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

inline PyObject* pair(at::Tensor first, at::Tensor second) {
  PyObject* result = PyTuple_New(2);
  PyTuple_SET_ITEM(result, 0, wrap(std::move(first)));
  PyTuple_SET_ITEM(result, 1, wrap(std::move(second)));
  return result;
}

// Lets other Python threads run while a kernel works.
struct WithoutInterpreterLock {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutInterpreterLock() { PyEval_RestoreThread(state); }
};

}  // namespace firstlight
