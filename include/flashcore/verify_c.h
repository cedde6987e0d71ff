/* The C ABI of the verifier, which names the first faulty stage of an attention function.
 *
 *   int32_t my_attention(const flashcore_verify_call* call, void* user);
 *
 *   flashcore_verify_options options;
 *   flashcore_verify_options_init(&options, sizeof options);
 *   flashcore_report* report = NULL;
 *   flashcore_verify(&options, my_attention, NULL, &report, &error);
 *   puts(flashcore_report_text(report));
 *   flashcore_report_free(report);
 *
 * `flashcore verify --lib libmine.so --symbol my_attention` calls a function of this type, too, and
 * my_attention_backward, if the library has it, as the flashcore_verify_backward_function.
 * docs/verify.md describes the calls and the tolerances. */
#ifndef FLASHCORE_VERIFY_C_H_
#define FLASHCORE_VERIFY_C_H_

#include "flashcore/flashcore.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One call of the function under test. q [batch, q_heads, q_len, head_dim],
 * k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, v_dim],
 * out [batch, q_heads, q_len, v_dim], lse f32 [batch, q_heads, q_len]; strides are never NULL and
 * need not be compact. Query head h reads KV head h / (q_heads / kv_heads). */
typedef struct flashcore_verify_call {
  size_t struct_size;
  const flashcore_tensor* q;
  const flashcore_tensor* k;
  const flashcore_tensor* v;
  const flashcore_tensor* out;     /* the function writes every element */
  const flashcore_tensor* lse;     /* likewise; NULL: not requested */
  const flashcore_tensor* q_scale; /* 8-bit only, else NULL: f32 [batch, q_heads] */
  const flashcore_tensor* k_scale; /* f32 [batch, kv_heads]: value = code * scale */
  const flashcore_tensor* v_scale; /* f32 [batch, kv_heads] */
  int64_t window_left;             /* keys to the left of the query's position; -1: all */
  int64_t window_right;
  double scale;      /* always set, also if it is the default */
  double softcap;    /* 0: none */
  int32_t has_scale; /* 0: scale is the default, 1 / sqrt(head_dim) */
  int32_t causal;
  int32_t num_splits; /* KV splits; 0: the function chooses */
  int32_t reserved;
  void* stream;  /* a cudaStream_t for device memory; NULL: the default stream */
  char* message; /* [message_bytes]: the function may write the reason of a failure */
  size_t message_bytes;
} flashcore_verify_call;

/* Returns FLASHCORE_OK, FLASHCORE_UNSUPPORTED for a call that it does not support (reported, not a
 * fault), or any other number for a failure. The results must be complete when it returns, or in
 * stream order. A wrapper of a function that allocates its own results returns one of the codes
 * below if a result has the wrong shape: a fault of `layout`, or of `lse`. */
enum {
  FLASHCORE_VERIFY_OUT_MISSHAPEN = 100,
  FLASHCORE_VERIFY_LSE_MISSHAPEN = 101,
  FLASHCORE_VERIFY_GRADIENT_MISSHAPEN = 102
};
typedef int32_t (*flashcore_verify_function)(const flashcore_verify_call* call, void* user);

/* One call of the backward pass. `forward` has q, k, v and the options; its out and lse are inputs
 * here, the correct results of the forward pass. A gradient has the shape of its tensor. The
 * function writes every element of dq, dk and dv. */
typedef struct flashcore_verify_backward_call {
  size_t struct_size;
  const flashcore_verify_call* forward;
  const flashcore_tensor* dout;
  const flashcore_tensor* dlse; /* f32 [batch, q_heads, q_len]; NULL: 0 */
  const flashcore_tensor* dq;
  const flashcore_tensor* dk;
  const flashcore_tensor* dv;
} flashcore_verify_backward_call;

/* Returns like flashcore_verify_function. A function without dlse returns FLASHCORE_UNSUPPORTED if
 * it is given. */
typedef int32_t (*flashcore_verify_backward_function)(const flashcore_verify_backward_call* call,
                                                      void* user);

/* Declarations about the function. Capabilities: -1: discovered by calls; 0: no; 1: yes. */
typedef struct flashcore_verify_options {
  size_t struct_size;
  const char* name;             /* of the function, for the report; NULL: "attention" */
  const char* dtype;            /* f64 f32 f16 bf16 e4m3 e5m2 int8 byte; NULL: f32 */
  const char* out_dtype;        /* NULL: dtype's own, f32 for 8-bit */
  const char* arithmetic;       /* format of the function's scores and P; NULL: dtype */
  const char* layout;           /* memory order of the tensors: "bhsd" (NULL) or "bshd" */
  const char* only;             /* run this probe alone, after discovery; NULL: all */
  const char* causal_alignment; /* "top-left", "bottom-right"; NULL: discovered */
  const char* lse_base;         /* "e" (NULL) or "2" */
  uint64_t seed;
  int64_t head_dims[8]; /* dims to probe; all 0: common dims that the function supports */
  int32_t quick;        /* 1: less than 5 s for a CPU function */
  int32_t gqa, batch, cross, causal, window, scale, softcap, splits, lse, strides, v_dim;
  /* Called before each probe, if not NULL. */
  void (*progress)(const char* probe, int32_t number, int32_t count, void* progress_user);
  void* progress_user;
  /* The backward pass, probed after the forward has passed; NULL: not probed. */
  flashcore_verify_backward_function backward;
  void* backward_user;
  int32_t dlse;          /* a capability, as above */
  int32_t deterministic; /* 1: gradients promise the same bits in every call; 0: the same values up
                          * to rounding */
} flashcore_verify_options;

FLASHCORE_C_API void flashcore_verify_options_init(flashcore_verify_options* options,
                                                   size_t struct_size);

typedef struct flashcore_report flashcore_report;

/* Returns FLASHCORE_OK if the probes ran; *report has the verdict. Otherwise nothing was verified.
 */
FLASHCORE_C_API int32_t flashcore_verify(const flashcore_verify_options* options,
                                         flashcore_verify_function function, void* user,
                                         flashcore_report** report, flashcore_error* error);

FLASHCORE_C_API int32_t flashcore_report_ok(const flashcore_report* report);
/* The faulty stage, one of those in docs/verify.md; "": none. */
FLASHCORE_C_API const char* flashcore_report_stage(const flashcore_report* report);
FLASHCORE_C_API const char* flashcore_report_text(const flashcore_report* report);
FLASHCORE_C_API const char* flashcore_report_json(const flashcore_report* report);
FLASHCORE_C_API const char* flashcore_report_html(const flashcore_report* report);
FLASHCORE_C_API void flashcore_report_free(flashcore_report* report);

#ifdef __cplusplus
}
#endif
#endif /* FLASHCORE_VERIFY_C_H_ */
