/* FlashCore's C ABI. C99, no dependency beyond the standard headers.
 *
 *   flashcore_params p;
 *   flashcore_params_init(&p, sizeof p);
 *   p.q = &q; p.k = &k; p.v = &v; p.out = &out; p.causal = 1;
 *   flashcore_plan_info plan = {sizeof plan};
 *   flashcore_plan(&p, &plan, &error);             how much workspace, which kernel
 *   p.workspace = buffer; p.workspace_bytes = plan.workspace_bytes;
 *   flashcore_workspace_init(p.workspace, p.workspace_bytes, device, stream, &error);   once
 *   flashcore_attention(&p, &error);               as often as you like
 *
 * Every function may be called from any thread; none keeps state between calls. A function returns
 * FLASHCORE_OK or another code, and then fills *error (which may be NULL) with the reason. */
#ifndef FLASHCORE_FLASHCORE_H_
#define FLASHCORE_FLASHCORE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FLASHCORE_C_API __attribute__((visibility("default")))
#else
#define FLASHCORE_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FLASHCORE_OK = 0,
  FLASHCORE_INVALID_ARGUMENT = 1, /* your mistake; the message says what to change */
  FLASHCORE_UNSUPPORTED = 2,      /* no kernel can do this; the message says what would be */
  FLASHCORE_OUT_OF_MEMORY = 3,
  FLASHCORE_CUDA_ERROR = 4, /* the CUDA runtime refused; the message carries its words */
  FLASHCORE_INTERNAL = 5,
  FLASHCORE_CANCELLED = 6 /* the params' flag was set */
};

typedef struct flashcore_error {
  int32_t code;
  char message[1020]; /* always terminated */
} flashcore_error;

/* The next three have the layout of DLDevice, DLDataType and DLTensor: a DLTensor* may be cast. */
typedef struct flashcore_device {
  int32_t device_type; /* FLASHCORE_CPU or FLASHCORE_CUDA */
  int32_t device_id;
} flashcore_device;
enum { FLASHCORE_CPU = 1, FLASHCORE_CUDA = 2 };

typedef struct flashcore_dtype {
  uint8_t code; /* FLASHCORE_FLOAT ... */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} flashcore_dtype;
enum {
  FLASHCORE_INT = 0,
  FLASHCORE_UINT = 1, /* 8 bits: a boolean mask, or the byte format of q, k and v */
  FLASHCORE_FLOAT = 2,
  FLASHCORE_BFLOAT = 4,
  FLASHCORE_BOOL = 6,
  /* 8-bit floats, with DLPack's codes; int8 is FLASHCORE_INT with 8 bits. See types.h. */
  FLASHCORE_FLOAT8_E4M3 = 10, /* e4m3fn */
  FLASHCORE_FLOAT8_E5M2 = 12
};

typedef struct flashcore_tensor {
  void* data;
  flashcore_device device;
  int32_t ndim;
  flashcore_dtype dtype;
  int64_t* shape;       /* [ndim] */
  int64_t* strides;     /* [ndim], in elements; NULL: compact, row-major */
  uint64_t byte_offset; /* added to data */
} flashcore_tensor;

/* One call. Shapes and meanings are those of flashcore::Tensors and flashcore::Options
 * (problem.h); NULL tensors are not given. */
typedef struct flashcore_params {
  size_t struct_size; /* sizeof(flashcore_params): set by flashcore_params_init */
  const flashcore_tensor* q;
  const flashcore_tensor* k;
  const flashcore_tensor* v;
  const flashcore_tensor* out;
  const flashcore_tensor* lse;
  const flashcore_tensor* bias;
  const flashcore_tensor* mask;
  const flashcore_tensor* alibi_slopes;
  const flashcore_tensor* sinks;
  const flashcore_tensor* cu_seqlens_q;
  const flashcore_tensor* cu_seqlens_k;
  const flashcore_tensor* used_k;
  const flashcore_tensor* block_table; /* i32 [batch, max_pages]: k and v are pages */
  const flashcore_tensor* q_start;
  const flashcore_tensor* k_start;
  int64_t window_left;  /* -1: no limit */
  int64_t window_right; /* -1: no limit */
  int64_t max_q_len;    /* with cu_seqlens_q; 0: total_q */
  int64_t max_kv_len;   /* with cu_seqlens_k; 0: total_k */
  double scale;   /* used if has_scale; default 1 / sqrt(head_dim); at most 1e30, but for f64 */
  double softcap; /* 0: none; a large one is no cap */
  int32_t has_scale;
  int32_t causal;
  int32_t partial;
  int32_t checked;
  int32_t num_splits;      /* 0: the planner chooses */
  int32_t reproducibility; /* 0: deterministic, 1: batch-invariant */
  int32_t threads;         /* of the CPU; 0: as many as the process may use */
  int32_t layout;          /* 0: [batch, heads, len, dim], 1: [batch, len, heads, dim] */
  const char* kernel;      /* NULL, or the id of the kernel to use */
  void* workspace;         /* on q's device, 256-byte aligned */
  size_t workspace_bytes;
  void* stream; /* cudaStream_t; NULL: the default stream */
  /* Of 8-bit q, k, v: f32 [1], [batch, heads] or [batch, heads, blocks]; NULL: 1 */
  const flashcore_tensor* q_scale;
  const flashcore_tensor* k_scale;
  const flashcore_tensor* v_scale;
  int64_t q_scale_block; /* rows, keys that share a scale where there are blocks */
  int64_t kv_scale_block;
  /* NULL: workspace begins with the header. Else the header, on a GPU; workspace is then what
   * follows it: Workspace::header in attention.h. */
  void* workspace_header;
  /* NULL, or a flag that another thread sets to nonzero, atomically, to end the call early: see
   * flashcore::run() in attention.h. Callers compiled without this field are served too. */
  const int32_t* cancel;
} flashcore_params;

/* Fills in the defaults. struct_size is sizeof(flashcore_params) of the caller. */
FLASHCORE_C_API void flashcore_params_init(flashcore_params* params, size_t struct_size);

typedef struct flashcore_plan_info {
  size_t struct_size;     /* set by the caller: sizeof(flashcore_plan_info) */
  const char* kernel;     /* its id */
  const char* family;     /* for flashcore_source_fingerprint */
  size_t workspace_bytes; /* what flashcore_attention needs */
  int64_t work_items;
  int32_t tile_q, tile_k;
  int32_t splits;
  int32_t uses_header; /* 0: the workspace need not be initialised */
} flashcore_plan_info;

/* What flashcore_attention will do with these params. Data pointers must be set, workspace not. */
FLASHCORE_C_API int32_t flashcore_plan(const flashcore_params* params, flashcore_plan_info* info,
                                       flashcore_error* error);

/* The plan in words. Writes at most capacity bytes, terminated; *needed is the full size. */
FLASHCORE_C_API int32_t flashcore_explain(const flashcore_params* params, char* text,
                                          size_t capacity, size_t* needed, flashcore_error* error);

/* Computes out (and lse). On failure the outputs are untouched; after FLASHCORE_CANCELLED they are
 * unspecified, unless the flag was set before the call. */
FLASHCORE_C_API int32_t flashcore_attention(const flashcore_params* params, flashcore_error* error);

/* A workspace begins with a header of so many bytes. */
enum { FLASHCORE_WORKSPACE_HEADER_BYTES = 64 * 1024 };

/* Zeroes the header, in stream order: once per buffer, before its first call. In a CUDA graph: once
 * before the capture, not in it; see attention.h. */
FLASHCORE_C_API int32_t flashcore_workspace_init(void* workspace, size_t workspace_bytes,
                                                 flashcore_device device, void* stream,
                                                 flashcore_error* error);

/* Synchronises and returns what a checked call found, clearing it. */
FLASHCORE_C_API int32_t flashcore_workspace_status(void* workspace, size_t workspace_bytes,
                                                   flashcore_device device, void* stream,
                                                   flashcore_error* error);

/* The capture under way on a CUDA stream, *id = 0 where none is; graph_ended may be NULL: see
 * flashcore::capture_id() in attention.h. */
FLASHCORE_C_API int32_t flashcore_capture_id(flashcore_device device, void* stream, uint64_t* id,
                                             int32_t* graph_ended, flashcore_error* error);

/* Joins partial results: outs[i] and lses[i], i < parts (at most 32), into out and lse. */
typedef struct flashcore_merge_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_merge_params) */
  const flashcore_tensor* outs;
  const flashcore_tensor* lses;
  size_t parts;
  const flashcore_tensor* out;
  const flashcore_tensor* lse;   /* or NULL */
  const flashcore_tensor* sinks; /* or NULL; in the last merge only */
  void* stream;
  const int32_t* cancel; /* or NULL: as in flashcore_params, also for callers without it */
} flashcore_merge_params;
FLASHCORE_C_API int32_t flashcore_merge(const flashcore_merge_params* params,
                                        flashcore_error* error);

/* Writes new keys and values into a cache, at used_k: see flashcore::append() in attention.h. */
typedef struct flashcore_append_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_append_params) */
  const flashcore_tensor* k_new;
  const flashcore_tensor* v_new;
  const flashcore_tensor* k; /* the cache; written */
  const flashcore_tensor* v;
  const flashcore_tensor* used_k;         /* lengths before the append */
  const flashcore_tensor* block_table;    /* or NULL: k and v are not paged */
  const flashcore_tensor* cu_seqlens_new; /* or NULL: every sequence gets as many */
  void* workspace;                        /* or NULL: bad values are left out unreported */
  size_t workspace_bytes;
  void* stream;
  const flashcore_tensor* k_scale; /* of an 8-bit cache, as in flashcore_params; NULL: 1 */
  const flashcore_tensor* v_scale;
  int64_t kv_scale_block;
  const int32_t* cancel; /* or NULL: as in flashcore_params, also for callers without it */
} flashcore_append_params;
FLASHCORE_C_API int32_t flashcore_append(const flashcore_append_params* params,
                                         flashcore_error* error);

/* f32, f16 or bf16 to an 8-bit type, and back: see flashcore/quant.h. */
typedef struct flashcore_quant_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_quant_params) */
  const flashcore_tensor* from;
  const flashcore_tensor* to;        /* written */
  const flashcore_tensor* scale;     /* f32 [1], [batch, heads] or [batch, heads, blocks] */
  const flashcore_tensor* saturated; /* or NULL; i32 of scale's shape, written by quantize */
  int64_t block_rows;                /* rows that share a scale, where it has blocks */
  int32_t given_scale;               /* 1: quantize reads scale; 0: it writes it */
  int32_t rotate;                    /* 1: rows are rotated, as QuantOptions::rotate says */
  void* workspace;                   /* or NULL; a GPU reports NaN that have no code there */
  size_t workspace_bytes;
  void* stream;
  const int32_t* cancel; /* or NULL: as in flashcore_params, also for callers without it */
} flashcore_quant_params;
FLASHCORE_C_API int32_t flashcore_quantize(const flashcore_quant_params* params,
                                           flashcore_error* error);
FLASHCORE_C_API int32_t flashcore_dequantize(const flashcore_quant_params* params,
                                             flashcore_error* error);

/* For bindings of Python: a call prepared once, then run on other arrays by one call from Python.
 * The two functions are of Python's own kind (METH_FASTCALL): `self` is the address of a
 * flashcore_python_call as an int, and the arguments are the arrays, `count` of them. They describe
 * each, put the descriptors' addresses into params for the time of the call, and run
 * flashcore_python_attention. */
typedef int (*flashcore_dlpack_reader)(void* object, flashcore_tensor* tensor);
enum { FLASHCORE_MAX_PYTHON_ARRAYS = 15 };
typedef struct flashcore_python_workspace {
  void* address;
  size_t bytes;
} flashcore_python_workspace;
typedef struct flashcore_python_call {
  /* The framework's `dltensor_from_py_object_no_sync` (DLPack's C exchange API), or NULL: then the
   * arrays' method __dlpack__ is called. */
  flashcore_dlpack_reader read;
  void* dlpack_name; /* the str "__dlpack__" */
  void* empty_like;  /* the framework's function; for flashcore_python_new alone */
  flashcore_params* params;
  const flashcore_python_workspace* cpu_workspace; /* in place of the params' for q on the CPU */
  flashcore_error* error;
  int32_t interruptible; /* as for flashcore_python_attention */
  int64_t count;         /* arrays of one call */
  const flashcore_tensor** fields[FLASHCORE_MAX_PYTHON_ARRAYS]; /* of params, one for each array */
} flashcore_python_call;
/* flashcore_attention and the others, called with the GIL, which they release. interruptible: 1 on
 * Python's main thread. Python's signal handlers then run during a CPU call that takes long; when
 * one of them raises, the call is cancelled and its exception is set. The params' own flag is not
 * read during a long call. */
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
/* Returns flashcore_attention's code as an int, or -1 where an array could not be described: then
 * nothing has run. NULL, with an exception, where a signal handler has raised. */
FLASHCORE_C_API void* flashcore_python_run(void* self, void* const* arrays, ptrdiff_t count);
/* Of q, k and v, where `fields` are theirs and out's: the result as a new array like q, or None
 * where it has another shape, an array could not be described or the call failed. */
FLASHCORE_C_API void* flashcore_python_new(void* self, void* const* arrays, ptrdiff_t count);

/* How many CUDA devices can be used; 0 with the reason in error->message where none can. */
FLASHCORE_C_API int32_t flashcore_cuda_device_count(flashcore_error* error);

FLASHCORE_C_API const char* flashcore_status_name(int32_t code); /* "invalid_argument" */
FLASHCORE_C_API const char* flashcore_version(void);             /* "0.1.0" */

/* Hash of the sources: family "" or NULL for the library, else a kernel family; NULL if unknown. */
FLASHCORE_C_API const char* flashcore_source_fingerprint(const char* family);

#ifdef __cplusplus
}
#endif
#endif /* FLASHCORE_FLASHCORE_H_ */
