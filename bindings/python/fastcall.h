/* The CPython glue of libflashcore.so: functions that python/flashcore calls through ctypes.
 *
 * A prepared call (flashcore_python_call) runs on new arrays by one call from Python.
 * flashcore_python_run and flashcore_python_new have CPython's METH_FASTCALL signature. `self` is
 * the address of a flashcore_python_call as an int; the arguments are its arrays. They describe the
 * arrays, put the descriptors' addresses into the params for the duration of the call, and run
 * flashcore_python_attention. */
#ifndef FLASHCORE_BINDINGS_PYTHON_FASTCALL_H_
#define FLASHCORE_BINDINGS_PYTHON_FASTCALL_H_

#include "flashcore/flashcore.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int (*flashcore_dlpack_reader)(void* object, flashcore_tensor* tensor);

enum { FLASHCORE_MAX_PYTHON_ARRAYS = 24 };

typedef struct flashcore_python_workspace {
  void* address;
  size_t bytes;
} flashcore_python_workspace;

typedef struct flashcore_python_call {
  /* The framework's dltensor_from_py_object_no_sync (DLPack's C exchange API). NULL: call the
   * arrays' method __dlpack__. */
  flashcore_dlpack_reader read;
  void* dlpack_name; /* the str "__dlpack__" */
  void* empty_like;  /* the framework's allocation function, for flashcore_python_new */
  flashcore_params* params;
  const flashcore_python_workspace* cpu_workspace; /* replaces the params' if q is on the CPU */
  flashcore_error* error;
  int32_t interruptible; /* as for flashcore_python_attention */
  uint32_t swapped;      /* bit i: axes 1 and 2 of array i, which has four, are read as swapped */
  flashcore_backward_params* backward; /* of a call for gradients; its `call` is params. Or NULL */
  int64_t count;                       /* number of arrays; the first is q */
  /* One per array, in params or backward. */
  const flashcore_tensor** fields[FLASHCORE_MAX_PYTHON_ARRAYS];
} flashcore_python_call;

/* flashcore_attention and the others, called with the GIL, which they release. interruptible: 1 on
 * Python's main thread. During a long CPU call Python's signal handlers then run. If one raises,
 * the call is cancelled and the exception is left set. A long call ignores the params' own flag. */
FLASHCORE_C_API int32_t flashcore_python_attention(const flashcore_params* params,
                                                   flashcore_error* error, int32_t interruptible);
FLASHCORE_C_API int32_t flashcore_python_merge(const flashcore_merge_params* params,
                                               flashcore_error* error, int32_t interruptible);
FLASHCORE_C_API int32_t flashcore_python_append(const flashcore_append_params* params,
                                                flashcore_error* error, int32_t interruptible);
FLASHCORE_C_API int32_t flashcore_python_quantize(const flashcore_quant_params* params,
                                                  flashcore_error* error, int32_t interruptible);
FLASHCORE_C_API int32_t flashcore_python_dequantize(const flashcore_quant_params* params,
                                                    flashcore_error* error, int32_t interruptible);

FLASHCORE_C_API int32_t flashcore_python_backward(const flashcore_backward_params* params,
                                                  flashcore_error* error, int32_t interruptible);

/* Returns the code of flashcore_attention or flashcore_attention_backward as an int, or -1 if an
 * array could not be described; then nothing has run. Returns NULL, with an exception, if a signal
 * handler raised. */
FLASHCORE_C_API void* flashcore_python_run(void* self, void* const* arrays, ptrdiff_t count);

/* For q, k and v, with `fields` those of q, k, v and out. Returns the result as a new array like q.
 * Returns None if the result has another shape, an array could not be described, or the call
 * failed. */
FLASHCORE_C_API void* flashcore_python_new(void* self, void* const* arrays, ptrdiff_t count);

#ifdef __cplusplus
}
#endif
#endif /* FLASHCORE_BINDINGS_PYTHON_FASTCALL_H_ */
