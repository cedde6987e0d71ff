/* FlashCore's C ABI. C99, no dependency beyond the standard headers.
 *
 *   flashcore_params p;
 *   flashcore_params_init(&p, sizeof p);
 *   p.q = &q; p.k = &k; p.v = &v; p.out = &out; p.causal = 1;
 *   flashcore_plan_info plan = {sizeof plan};
 *   flashcore_plan(&p, &plan, &error);             kernel and workspace size
 *   p.workspace = buffer; p.workspace_bytes = plan.workspace_bytes;
 *   flashcore_workspace_init(p.workspace, p.workspace_bytes, device, stream, &error);   once
 *   flashcore_attention(&p, &error);               any number of times
 *
 * Every function may be called from any thread. None keeps state between calls. A function returns
 * FLASHCORE_OK, or another code and the reason in *error, which may be NULL.
 *
 * Structs grow at their end only. A program compiled against an older header keeps working: fields
 * that it does not have take their defaults. */
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
  FLASHCORE_INVALID_ARGUMENT = 1, /* the caller's mistake; the message says what to change */
  FLASHCORE_UNSUPPORTED = 2, /* no kernel supports the call; the message says what is supported */
  FLASHCORE_OUT_OF_MEMORY = 3,
  FLASHCORE_CUDA_ERROR = 4, /* the CUDA runtime failed; the message has its text */
  FLASHCORE_INTERNAL = 5,
  FLASHCORE_CANCELLED = 6 /* the cancellation flag of the params was set */
};

typedef struct flashcore_error {
  int32_t code;
  char message[1020]; /* always terminated */
} flashcore_error;

/* The next three structs have the layout of DLDevice, DLDataType and DLTensor: a DLTensor* may be
 * cast to flashcore_tensor*. */
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
  /* 8-bit floats, with DLPack's codes. int8 is FLASHCORE_INT with 8 bits. See types.h. */
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

/* One call. docs/options.md lists all fields; shapes are those of flashcore::Tensors (problem.h).
 * NULL: the tensor is not given. */
typedef struct flashcore_params {
  size_t struct_size; /* sizeof(flashcore_params), set by flashcore_params_init */
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
  const flashcore_tensor* used_k;      /* seqused_k in messages */
  const flashcore_tensor* block_table; /* i32 [batch, max_pages]: k and v are paged */
  const flashcore_tensor* q_start;
  const flashcore_tensor* k_start;
  int64_t window_left;  /* -1: no limit */
  int64_t window_right; /* -1: no limit */
  int64_t max_q_len;    /* with cu_seqlens_q; 0: total_q */
  int64_t max_kv_len;   /* with cu_seqlens_k; 0: total_k */
  double scale;         /* used if has_scale; default 1 / sqrt(head_dim) */
  double softcap;       /* 0: none */
  int32_t has_scale;
  int32_t causal;
  int32_t partial;
  int32_t checked;
  int32_t num_splits;      /* 0: the planner chooses */
  int32_t reproducibility; /* 0: deterministic, 1: batch-invariant */
  int32_t threads;         /* CPU threads; 0: as many as the process may use */
  int32_t layout;          /* 0: [batch, heads, len, dim], 1: [batch, len, heads, dim] */
  const char* kernel;      /* id of the kernel to run; NULL: the planner chooses */
  void* workspace;         /* on q's device, 256-byte aligned */
  size_t workspace_bytes;
  void* stream; /* cudaStream_t; NULL: the default stream */
  /* Scales of 8-bit q, k, v: f32 [1], [batch, heads] or [batch, heads, blocks]; NULL: 1 */
  const flashcore_tensor* q_scale;
  const flashcore_tensor* k_scale;
  const flashcore_tensor* v_scale;
  int64_t q_scale_block; /* rows (keys) per scale block */
  int64_t kv_scale_block;
  /* NULL: the workspace begins with the header. Otherwise a separate header, in GPU memory; the
   * workspace then has none. See Workspace::header in attention.h. */
  void* workspace_header;
  /* A flag that another thread sets to nonzero, atomically, to end the call early; NULL: none. See
   * flashcore::run() in attention.h. */
  const int32_t* cancel;
  /* A block mask, instead of mask; see flashcore_block_mask_create. i32 [batch|1, q_heads|1,
   * q_blocks, k_blocks] and i32 [tiles, block_q, block_k / 32]. */
  const flashcore_tensor* mask_blocks;
  const flashcore_tensor* mask_bits;
} flashcore_params;

/* Fills in the defaults. struct_size is the caller's sizeof(flashcore_params). */
FLASHCORE_C_API void flashcore_params_init(flashcore_params* params, size_t struct_size);

typedef struct flashcore_plan_info {
  size_t struct_size;     /* set by the caller: sizeof(flashcore_plan_info) */
  const char* kernel;     /* its id */
  const char* family;     /* for flashcore_source_fingerprint */
  size_t workspace_bytes; /* required by flashcore_attention */
  int64_t work_items;     /* tiles: (batch, head, query tile, split) */
  int32_t tile_q, tile_k;
  int32_t splits;
  int32_t uses_header; /* 0: the workspace need not be initialised */
} flashcore_plan_info;

/* Plans flashcore_attention for these params. Data pointers must be set, the workspace need not. */
FLASHCORE_C_API int32_t flashcore_plan(const flashcore_params* params, flashcore_plan_info* info,
                                       flashcore_error* error);

/* Describes the plan in text. Writes at most capacity bytes, terminated; *needed is the full size.
 */
FLASHCORE_C_API int32_t flashcore_explain(const flashcore_params* params, char* text,
                                          size_t capacity, size_t* needed, flashcore_error* error);

/* Computes out (and lse). If the call fails, the outputs are unchanged. After FLASHCORE_CANCELLED
 * they are unspecified, unless the flag was set before the call. */
FLASHCORE_C_API int32_t flashcore_attention(const flashcore_params* params, flashcore_error* error);

/* Size of the header at the start of a workspace. */
enum { FLASHCORE_WORKSPACE_HEADER_BYTES = 64 * 1024 };

/* Zeroes the header, in stream order. Call it once per buffer, before its first use. With CUDA
 * graphs call it before the capture, not in it; see attention.h. */
FLASHCORE_C_API int32_t flashcore_workspace_init(void* workspace, size_t workspace_bytes,
                                                 flashcore_device device, void* stream,
                                                 flashcore_error* error);

/* Synchronises the stream, then returns and clears the error that a checked call found. */
FLASHCORE_C_API int32_t flashcore_workspace_status(void* workspace, size_t workspace_bytes,
                                                   flashcore_device device, void* stream,
                                                   flashcore_error* error);

/* The capture in progress on a CUDA stream; *id = 0: none. graph_ended may be NULL. See
 * flashcore::capture_id() in attention.h. */
FLASHCORE_C_API int32_t flashcore_capture_id(flashcore_device device, void* stream, uint64_t* id,
                                             int32_t* graph_ended, flashcore_error* error);

/* Block masks: masks by blocks of queries and keys. See flashcore/block_mask.h. */
enum {
  FLASHCORE_MASK_DOCUMENTS = 0,
  FLASHCORE_MASK_PREFIX_LM = 1,
  FLASHCORE_MASK_SLIDING_WINDOW = 2,
  FLASHCORE_MASK_TREE = 3,
  FLASHCORE_MASK_DENSE = 4,
  FLASHCORE_MASK_BSR = 5
};
typedef struct flashcore_block_mask_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_block_mask_params) */
  int64_t q_len, kv_len;
  int64_t block_q, block_k; /* powers of two; 0: 128 */
  int64_t window_left;      /* with FLASHCORE_MASK_SLIDING_WINDOW; -1: no limit */
  int64_t window_right;
  int64_t global_tokens;
  const flashcore_tensor* values;  /* in host memory, as BlockMaskSpec::values */
  const flashcore_tensor* columns; /* FLASHCORE_MASK_BSR only */
  int32_t pattern;                 /* FLASHCORE_MASK_... */
} flashcore_block_mask_params;
typedef struct flashcore_block_mask flashcore_block_mask;

/* Builds a block mask in host memory. Free it with flashcore_block_mask_free. */
FLASHCORE_C_API int32_t flashcore_block_mask_create(const flashcore_block_mask_params* params,
                                                    flashcore_block_mask** mask,
                                                    flashcore_error* error);
/* Descriptors for flashcore_params, or to be copied to a GPU. They are valid until the mask is
 * freed. */
FLASHCORE_C_API const flashcore_tensor* flashcore_block_mask_blocks(
    const flashcore_block_mask* mask);
FLASHCORE_C_API const flashcore_tensor* flashcore_block_mask_bits(const flashcore_block_mask* mask);
FLASHCORE_C_API void flashcore_block_mask_free(flashcore_block_mask* mask);

/* Writes a block mask to a boolean tensor [batch, heads, q_len, kv_len]. All in host memory. */
FLASHCORE_C_API int32_t flashcore_block_mask_expand(const flashcore_tensor* mask_blocks,
                                                    const flashcore_tensor* mask_bits,
                                                    const flashcore_tensor* dense,
                                                    flashcore_error* error);

/* Merges partial results outs[i] and lses[i], i < parts, into out and lse. Up to 32 parts need no
 * memory; see flashcore::merge() in attention.h. */
typedef struct flashcore_merge_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_merge_params) */
  const flashcore_tensor* outs;
  const flashcore_tensor* lses;
  size_t parts;
  const flashcore_tensor* out;
  const flashcore_tensor* lse;   /* or NULL */
  const flashcore_tensor* sinks; /* or NULL; in the last merge only */
  void* stream;
  const int32_t* cancel; /* or NULL; as in flashcore_params */
} flashcore_merge_params;
FLASHCORE_C_API int32_t flashcore_merge(const flashcore_merge_params* params,
                                        flashcore_error* error);

/* Writes new keys and values into a KV cache at used_k. See flashcore::append() in attention.h. */
typedef struct flashcore_append_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_append_params) */
  const flashcore_tensor* k_new;
  const flashcore_tensor* v_new;
  const flashcore_tensor* k; /* the cache; written */
  const flashcore_tensor* v;
  const flashcore_tensor* used_k;         /* lengths before the append; seqused_k in messages */
  const flashcore_tensor* block_table;    /* or NULL: k and v are not paged */
  const flashcore_tensor* cu_seqlens_new; /* or NULL: all sequences get the same number of keys */
  void* workspace;                        /* or NULL: invalid rows are skipped without a report */
  size_t workspace_bytes;
  void* stream;
  const flashcore_tensor* k_scale; /* of an 8-bit cache, as in flashcore_params; NULL: 1 */
  const flashcore_tensor* v_scale;
  int64_t kv_scale_block;
  const int32_t* cancel; /* or NULL; as in flashcore_params */
} flashcore_append_params;
FLASHCORE_C_API int32_t flashcore_append(const flashcore_append_params* params,
                                         flashcore_error* error);

/* Converts f32, f16 or bf16 to an 8-bit type, and back. See flashcore/quant.h. */
typedef struct flashcore_quant_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_quant_params) */
  const flashcore_tensor* from;
  const flashcore_tensor* to;        /* written */
  const flashcore_tensor* scale;     /* f32 [1], [batch, heads] or [batch, heads, blocks] */
  const flashcore_tensor* saturated; /* or NULL; i32, scale's shape, written by quantize */
  int64_t block_rows;                /* rows per scale block */
  int32_t given_scale;               /* 1: quantize reads scale; 0: it writes scale */
  int32_t rotate;                    /* 1: rotate the rows; see QuantOptions::rotate */
  void* workspace;                   /* or NULL; a GPU reports NaN that int8 and byte lack there */
  size_t workspace_bytes;
  void* stream;
  const int32_t* cancel; /* or NULL; as in flashcore_params */
} flashcore_quant_params;
FLASHCORE_C_API int32_t flashcore_quantize(const flashcore_quant_params* params,
                                           flashcore_error* error);
FLASHCORE_C_API int32_t flashcore_dequantize(const flashcore_quant_params* params,
                                             flashcore_error* error);

/* Gradients of a call. See flashcore/backward.h. */
typedef struct flashcore_backward_params {
  size_t struct_size; /* set by the caller: sizeof(flashcore_backward_params) */
  /* The forward call: its tensors, of which out and lse are inputs here, its options, and the
   * workspace, stream and cancellation flag of this one. `layout` also applies to the gradients. */
  const flashcore_params* call;
  const flashcore_tensor* dout;
  const flashcore_tensor* dlse; /* or NULL: 0 */
  /* Written; NULL: not computed. Their types may be f32 where the inputs have 16 bits. */
  const flashcore_tensor* dq;
  const flashcore_tensor* dk;
  const flashcore_tensor* dv;
  const flashcore_tensor* dbias;
  const flashcore_tensor* dsinks;
  /* 1: out and lse cover more keys than the call has, as in a step of a ring. The LSE is then taken
   * as it is: see BackwardPlan::exact_stats. */
  int32_t global_lse;
} flashcore_backward_params;

/* As flashcore_plan, flashcore_explain and flashcore_attention. */
FLASHCORE_C_API int32_t flashcore_backward_plan(const flashcore_backward_params* params,
                                                flashcore_plan_info* info, flashcore_error* error);
FLASHCORE_C_API int32_t flashcore_backward_explain(const flashcore_backward_params* params,
                                                   char* text, size_t capacity, size_t* needed,
                                                   flashcore_error* error);
FLASHCORE_C_API int32_t flashcore_attention_backward(const flashcore_backward_params* params,
                                                     flashcore_error* error);

/* The number of usable CUDA devices. If it is 0, error->message says why. */
FLASHCORE_C_API int32_t flashcore_cuda_device_count(flashcore_error* error);

FLASHCORE_C_API const char* flashcore_status_name(int32_t code); /* "invalid_argument" */
FLASHCORE_C_API const char* flashcore_version(void);             /* "0.2.0" */

/* Hash of the sources of the library (family NULL or "") or of a kernel family; NULL: unknown
 * family. */
FLASHCORE_C_API const char* flashcore_source_fingerprint(const char* family);

#ifdef __cplusplus
}
#endif
#endif /* FLASHCORE_FLASHCORE_H_ */
