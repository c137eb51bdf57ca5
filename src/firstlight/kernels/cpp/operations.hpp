// Owns the table of native operations as Python calls them.
// It refuses to know how anything is computed.
#pragma once
#include <Python.h>

#include <span>

namespace firstlight {

struct Machine {
  bool amx = false;
};

using Arguments = PyObject* const*;

// An argument the native kernel doesn't take: the call goes to the reference.
struct NotTaken {};

struct Operation {
  const char* name;
  Py_ssize_t least, most;  // arguments; all are positional
  PyObject* (*run)(Arguments arguments, Py_ssize_t count, const Machine& machine);
};

std::span<const Operation> operations();
std::span<const Operation> packed_operations();
std::span<const Operation> expert_operations();
std::span<const Operation> sequence_operations();
std::span<const Operation> attention_operations();

}  // namespace firstlight
