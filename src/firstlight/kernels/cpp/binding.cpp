// Owns the Python module: callable kernels that take tensors or hand the call to a reference.
// It refuses to know how anything is computed.
#include <Python.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "operations.hpp"

namespace firstlight {
namespace {

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
  for (const std::span<const Operation> table :
       {operations(), packed_operations(), expert_operations(), sequence_operations(), attention_operations()}) {
    const auto found = std::find_if(table.begin(), table.end(), [&](const Operation& operation) {
      return std::string_view(operation.name) == name;
    });
    if (found == table.end()) continue;
    KernelObject* kernel = PyObject_New(KernelObject, kernel_type());
    if (kernel == nullptr) return nullptr;
    kernel->call = call_kernel;
    kernel->operation = &*found;
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
