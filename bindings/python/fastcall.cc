#include "bindings/python/fastcall.h"

#include <cstddef>
#include <cstdint>

#include "bindings/python/polled_call.h"

// Functions of CPython's stable ABI. They are weak: null unless an interpreter has loaded this
// library, and only an interpreter calls the functions below.
#define FLASHCORE_PYTHON extern "C" __attribute__((weak))
FLASHCORE_PYTHON void* PyCapsule_GetPointer(void* capsule, const char* name);
FLASHCORE_PYTHON int PyErr_CheckSignals();
FLASHCORE_PYTHON void PyErr_Clear();
FLASHCORE_PYTHON void* PyErr_Occurred();
FLASHCORE_PYTHON void PyEval_RestoreThread(void* state);
FLASHCORE_PYTHON void* PyEval_SaveThread();
FLASHCORE_PYTHON void* PyLong_AsVoidPtr(void* object);
FLASHCORE_PYTHON void* PyLong_FromLong(long value);  // NOLINT: its type in Python
FLASHCORE_PYTHON void* PyObject_CallFunctionObjArgs(void* function, ...);          // NOLINT: as is
FLASHCORE_PYTHON void* PyObject_CallMethodObjArgs(void* object, void* name, ...);  // NOLINT: as is
FLASHCORE_PYTHON void* Py_BuildValue(const char* format, ...);                     // NOLINT: as is
FLASHCORE_PYTHON void Py_DecRef(void* object);

namespace flashcore::python {
namespace {

/// Descriptors of a call's arrays, in the order of its fields.
class Arrays {
 public:
  explicit Arrays(const flashcore_python_call& call) : call_(call) {}
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays() {
    for (int i = 0; i < held_; ++i) Py_DecRef(capsules_[i]);
  }

  /// Describes one more array. Returns false, and clears the exception, if that fails.
  bool add(void* array) {
    const flashcore_tensor* described = call_.read != nullptr ? read(array) : open(array);
    if (described == nullptr) {
      PyErr_Clear();
      return false;
    }
    if ((call_.swapped >> count_ & 1) != 0) described = swap(*described);
    all_[count_++] = described;
    return described != nullptr;
  }

  int count() const { return count_; }
  const flashcore_tensor* operator[](int i) const { return all_[i]; }

 private:
  const flashcore_tensor* read(void* array) {
    flashcore_tensor* tensor = &tensors_[count_];
    return call_.read(array, tensor) == 0 ? tensor : nullptr;
  }

  /// The object in a DLPack capsule begins with a DLTensor.
  const flashcore_tensor* open(void* array) {
    void* capsule = PyObject_CallMethodObjArgs(array, call_.dlpack_name, nullptr);
    if (capsule == nullptr) return nullptr;
    capsules_[held_++] = capsule;
    return static_cast<const flashcore_tensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  }

  /// The array with axes 1 and 2 swapped; null if it does not have four axes with strides.
  const flashcore_tensor* swap(const flashcore_tensor& array) {
    if (array.ndim != kAxes || array.strides == nullptr) return nullptr;
    flashcore_tensor& swapped = tensors_[count_];
    std::int64_t* const shape = extents_[count_];
    std::int64_t* const strides = shape + kAxes;
    for (int to = 0; to < kAxes; ++to) {
      const int from = to == 1 || to == 2 ? 3 - to : to;
      shape[to] = array.shape[from];
      strides[to] = array.strides[from];
    }
    swapped = array;
    swapped.shape = shape;
    swapped.strides = strides;
    return &swapped;
  }

  static constexpr int kAxes = 4;

  const flashcore_python_call& call_;
  int count_ = 0, held_ = 0;
  std::int64_t extents_[FLASHCORE_MAX_PYTHON_ARRAYS][2 * kAxes];  // of swapped arrays
  const flashcore_tensor* all_[FLASHCORE_MAX_PYTHON_ARRAYS];
  flashcore_tensor tensors_[FLASHCORE_MAX_PYTHON_ARRAYS];
  void* capsules_[FLASHCORE_MAX_PYTHON_ARRAYS];
};

template <typename Params>
using Function = std::int32_t (*)(const Params*, flashcore_error*);

std::int32_t run_long(Function<flashcore_params>, const flashcore_params& params, const Stop& stop,
                      flashcore_error* error) {
  return run_attention_polled(params, stop, error);
}

std::int32_t run_long(Function<flashcore_backward_params>, const flashcore_backward_params& params,
                      const Stop& stop, flashcore_error* error) {
  return run_backward_polled(params, stop, error);
}

template <typename Params>
std::int32_t run_long(Function<Params> function, const Params& params, const Stop& stop,
                      flashcore_error* error) {
  Params own = params;
  const auto call = [&](const std::int32_t* cancel, flashcore_error* failed) {
    own.cancel = cancel;
    return function(&own, failed);
  };
  return run_polled(call, stop, error);
}

/// Calls the function without the GIL. If `interruptible`, Python's signal handlers run during a
/// long call. If one of them raises, the call is cancelled and the exception is left set.
template <typename Params>
std::int32_t without_gil(Function<Params> function, const Params* params, flashcore_error* error,
                         bool interruptible) {
  void* state = PyEval_SaveThread();
  std::int32_t code;
  if (interruptible && params != nullptr && params->struct_size == sizeof *params &&
      is_long(*params)) {
    const auto raised = [&state] {
      PyEval_RestoreThread(state);
      const bool has_raised = PyErr_CheckSignals() != 0;
      state = PyEval_SaveThread();
      return has_raised;
    };
    code = run_long(function, *params, raised, error);
  } else {
    code = function(params, error);
  }
  PyEval_RestoreThread(state);
  return code;
}

/// Restores a struct at the end of a scope. Does nothing for null.
template <typename Params>
class Restored {
 public:
  explicit Restored(Params* params) : params_(params) {
    if (params != nullptr) before_ = *params;
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;
  ~Restored() {
    if (params_ != nullptr) *params_ = before_;
  }

 private:
  Params* params_;
  Params before_{};
};

/// Runs on described arrays. Python may use the same params in a finaliser before or after the
/// call, and in a signal handler during it. They are restored, and a call that lets handlers run
/// works on a copy.
std::int32_t run_described(const flashcore_python_call& call, const Arrays& arrays) {
  flashcore_params& params = *call.params;
  const Restored forward(&params);
  const Restored backward(call.backward);
  for (int i = 0; i < arrays.count(); ++i) *call.fields[i] = arrays[i];
  if (is_cpu(arrays[0]->device)) {
    params.workspace = call.cpu_workspace->address;
    params.workspace_bytes = call.cpu_workspace->bytes;
    params.workspace_header = nullptr;
    params.stream = nullptr;
  }
  const bool interruptible = call.interruptible != 0;
  if (call.backward != nullptr) {
    return without_gil(flashcore_attention_backward, call.backward, call.error, interruptible);
  }
  return without_gil(flashcore_attention, &params, call.error, interruptible);
}

/// Returns the code of the call, or -1 if an array could not be described.
std::int32_t run_arrays(const flashcore_python_call& call, void* const* given,
                        std::ptrdiff_t count) {
  if (count != call.count) return -1;
  Arrays arrays(call);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    if (!arrays.add(given[i])) return -1;
  }
  return run_described(call, arrays);
}

bool have_same_width(const flashcore_tensor& a, const flashcore_tensor& b) {
  return a.ndim > 0 && b.ndim > 0 && a.shape[a.ndim - 1] == b.shape[b.ndim - 1];
}

/// Returns a new array with the result, which the caller owns; null if the call failed or did not
/// run.
void* run_to_new(const flashcore_python_call& call, void* const* given, std::ptrdiff_t count) {
  constexpr std::ptrdiff_t kInputs = 3;  // q, k, v; out is the fourth field
  if (count != kInputs || call.count != kInputs + 1) return nullptr;
  Arrays arrays(call);
  for (std::ptrdiff_t i = 0; i < kInputs; ++i) {
    if (!arrays.add(given[i])) return nullptr;
  }
  if (!have_same_width(*arrays[0], *arrays[2])) return nullptr;
  void* const out = PyObject_CallFunctionObjArgs(call.empty_like, given[0], nullptr);
  if (out == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  if (arrays.add(out) && run_described(call, arrays) == FLASHCORE_OK) return out;
  Py_DecRef(out);
  return nullptr;
}

const flashcore_python_call& call_at(void* self) {
  return *static_cast<const flashcore_python_call*>(PyLong_AsVoidPtr(self));
}

}  // namespace
}  // namespace flashcore::python

using namespace flashcore::python;  // NOLINT: the C functions below are this file's purpose

void* flashcore_python_run(void* self, void* const* arrays, std::ptrdiff_t count) {
  const std::int32_t code = run_arrays(call_at(self), arrays, count);
  return code == FLASHCORE_CANCELLED ? nullptr : PyLong_FromLong(code);
}

void* flashcore_python_new(void* self, void* const* arrays, std::ptrdiff_t count) {
  void* const out = run_to_new(call_at(self), arrays, count);
  if (out != nullptr || PyErr_Occurred() != nullptr) return out;
  return Py_BuildValue("");  // None
}

std::int32_t flashcore_python_attention(const flashcore_params* params, flashcore_error* error,
                                        std::int32_t interruptible) {
  return without_gil(flashcore_attention, params, error, interruptible != 0);
}

std::int32_t flashcore_python_merge(const flashcore_merge_params* params, flashcore_error* error,
                                    std::int32_t interruptible) {
  return without_gil(flashcore_merge, params, error, interruptible != 0);
}

std::int32_t flashcore_python_append(const flashcore_append_params* params, flashcore_error* error,
                                     std::int32_t interruptible) {
  return without_gil(flashcore_append, params, error, interruptible != 0);
}

std::int32_t flashcore_python_quantize(const flashcore_quant_params* params, flashcore_error* error,
                                       std::int32_t interruptible) {
  return without_gil(flashcore_quantize, params, error, interruptible != 0);
}

std::int32_t flashcore_python_dequantize(const flashcore_quant_params* params,
                                         flashcore_error* error, std::int32_t interruptible) {
  return without_gil(flashcore_dequantize, params, error, interruptible != 0);
}

std::int32_t flashcore_python_backward(const flashcore_backward_params* params,
                                       flashcore_error* error, std::int32_t interruptible) {
  return without_gil(flashcore_attention_backward, params, error, interruptible != 0);
}
