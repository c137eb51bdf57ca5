// Owns the Python module: callable kernels that take tensors or hand the call to a reference.
// It refuses to know how anything is computed.
#include "binding_support.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <new>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "linear.hpp"

namespace firstlight {
namespace {

struct Machine {
  bool amx = false;
};

using Arguments = PyObject* const*;
struct Operation {
  const char* name;
  Py_ssize_t least, most;  // arguments; all are positional
  PyObject* (*run)(Arguments arguments, Py_ssize_t count, const Machine& machine);
};

constexpr std::int64_t kVectorRows = 8;      // up to here the weights' bytes set the speed
constexpr std::int64_t kVectorRowsAlone = 32;  // without tiles, beyond this MKL is better

void run_linear(LinearCall& call, const Machine& machine) {
  call.threads = at::get_num_threads();
  require(machine.amx || call.rows <= kVectorRowsAlone);
  const WithoutInterpreterLock unlocked;
  if (machine.amx && call.rows > kVectorRows) {
    linear_amx(call);
  } else {
    linear_avx512(call);
  }
}

const at::Tensor& rows_of(PyObject* object, LinearCall& call) {
  const at::Tensor& x = tensor_of(object, 2);
  require(x.size(1) > 0 && (x.stride(1) == 1 || x.size(1) == 1));
  call.x = floats(x);
  call.x_stride = x.stride(0);
  call.rows = x.size(0);
  call.inputs = x.size(1);
  return x;
}

void set_segment(LinearSegment& segment, PyObject* weight_object, PyObject* bias,
                 const LinearCall& call) {
  const at::Tensor& weight = dense_of(weight_object, 2);
  require(weight.size(1) == call.inputs);
  segment.weight = floats(weight);
  segment.outputs = weight.size(0);
  segment.bias = optional_vector(bias, segment.outputs);
}

at::Tensor new_out(LinearSegment& segment, const LinearCall& call, const at::Tensor& x) {
  at::Tensor out = at::empty({call.rows, segment.outputs}, x.options());
  segment.out = out.mutable_data_ptr<float>();
  return out;
}

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

const Operation kOperations[] = {
    {"linear", 2, 3, run_linear_one},
    {"linear_add", 4, 4, run_linear_one},
    {"linear_group", 3, 3, run_linear_group},
    {"gated_mlp_in", 3, 5, run_gated_mlp_in},
};

// A callable kernel: the native operation, and the reference for calls it doesn't take.
struct KernelObject {
  PyObject_HEAD
  vectorcallfunc call;
  const Operation* operation;
  PyObject* reference;
  Machine machine;
};

PyObject* call_kernel(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  auto* kernel = reinterpret_cast<KernelObject*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  const bool plain = names == nullptr || PyTuple_GET_SIZE(names) == 0;
  if (plain && count >= kernel->operation->least && count <= kernel->operation->most) {
    try {
      return kernel->operation->run(arguments, count, kernel->machine);
    } catch (const NotTaken&) {
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    } catch (const std::out_of_range& error) {
      PyErr_SetString(PyExc_IndexError, error.what());
      return nullptr;
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
      return nullptr;
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(kernel->reference, arguments, flags, names);
}

void delete_kernel(PyObject* self) {
  Py_XDECREF(reinterpret_cast<KernelObject*>(self)->reference);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
}

PyTypeObject* kernel_type() {
  static PyTypeObject type = [] {
    PyTypeObject made = {PyVarObject_HEAD_INIT(nullptr, 0)};
    made.tp_name = "firstlight_native.Kernel";
    made.tp_basicsize = sizeof(KernelObject);
    made.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    made.tp_vectorcall_offset = offsetof(KernelObject, call);
    made.tp_call = PyVectorcall_Call;
    made.tp_dealloc = delete_kernel;
    return made;
  }();
  return &type;
}

bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// features() -> tuple of CPU features this process may use, named as Linux names them.
PyObject* features(PyObject*, PyObject*) {
  __builtin_cpu_init();
  std::vector<const char*> found;
  if (__builtin_cpu_supports("avx2")) found.push_back("avx2");
  if (__builtin_cpu_supports("avx512f")) found.push_back("avx512f");
  if (__builtin_cpu_supports("avx512bw")) found.push_back("avx512bw");
  if (__builtin_cpu_supports("avx512dq")) found.push_back("avx512dq");
  if (__builtin_cpu_supports("avx512vl")) found.push_back("avx512vl");
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "+b"(b), "+c"(c), "+d"(d));
  if ((d >> 22 & 1) && (d >> 24 & 1) && request_tiles()) {
    found.push_back("amx_bf16");
    found.push_back("amx_tile");
  }
  PyObject* names = PyList_New(0);
  for (const char* name : found) {
    PyObject* text = PyUnicode_FromString(name);
    PyList_Append(names, text);
    Py_DECREF(text);
  }
  PyObject* result = PyList_AsTuple(names);
  Py_DECREF(names);
  return result;
}

// kernel(operation, reference, use_tiles) -> callable.
PyObject* make_kernel(PyObject*, PyObject* arguments) {
  const char* name = nullptr;
  PyObject* reference = nullptr;
  int use_tiles = 0;
  if (!PyArg_ParseTuple(arguments, "sOp", &name, &reference, &use_tiles)) return nullptr;
  for (const Operation& operation : kOperations) {
    if (std::string_view(operation.name) != name) continue;
    KernelObject* kernel = PyObject_New(KernelObject, kernel_type());
    if (kernel == nullptr) return nullptr;
    kernel->call = call_kernel;
    kernel->operation = &operation;
    kernel->reference = Py_NewRef(reference);
    kernel->machine.amx = use_tiles != 0;
    return reinterpret_cast<PyObject*>(kernel);
  }
  return PyErr_Format(PyExc_KeyError, "no native kernel named %s", name);
}

PyMethodDef kMethods[] = {
    {"features", features, METH_NOARGS, "Names of CPU features this process may use."},
    {"kernel", make_kernel, METH_VARARGS, "A callable native kernel with its reference."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "firstlight_native", nullptr, -1, kMethods};

}  // namespace
}  // namespace firstlight

PyMODINIT_FUNC PyInit_firstlight_native() {
  if (PyType_Ready(firstlight::kernel_type()) < 0) return nullptr;
  return PyModule_Create(&firstlight::kModule);
}
