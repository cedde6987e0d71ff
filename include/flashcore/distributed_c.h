/* The C ABI of context parallelism: plans without a GPU, attention and gradients over three
 * callbacks. See flashcore/distributed.h and docs/distributed.md. */
#ifndef FLASHCORE_DISTRIBUTED_C_H_
#define FLASHCORE_DISTRIBUTED_C_H_

#include "flashcore/flashcore.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FLASHCORE_SCHEME_AUTO = 0,
  FLASHCORE_SCHEME_RING = 1,
  FLASHCORE_SCHEME_GATHER = 2,
  FLASHCORE_SCHEME_ULYSSES = 3,
  FLASHCORE_SCHEME_2D = 4,
  FLASHCORE_SCHEME_HALO = 5,
  FLASHCORE_SCHEME_DECODE = 6 /* plans of flashcore_distributed_decode; never chosen */
};
enum { FLASHCORE_SHARDING_ZIGZAG = 0, FLASHCORE_SHARDING_CONTIGUOUS = 1 };

/* One attention over all ranks, and the speeds of their machines. */
typedef struct flashcore_distributed_problem {
  size_t struct_size; /* set by the caller: sizeof(flashcore_distributed_problem) */
  int32_t ranks;
  int32_t ranks_per_node;
  int32_t scheme;     /* FLASHCORE_SCHEME_* */
  int32_t sharding;   /* FLASHCORE_SHARDING_* */
  int32_t head_ranks; /* 2d: ranks that divide the heads; 0: chosen */
  int32_t causal;
  int32_t reproducibility; /* as in flashcore_params */
  flashcore_dtype dtype;
  int64_t batch, q_heads, kv_heads, head_dim, v_dim;
  int64_t window_left, window_right; /* -1: no limit */
  int64_t length;                    /* rows of q and of k, if q_rows is NULL */
  const int64_t* q_rows;             /* [ranks], or NULL: as equal as possible */
  const int64_t* k_rows;             /* [ranks], or NULL: q_rows */
  const int64_t* documents;          /* [documents_count]: first rows, then the length; or NULL */
  size_t documents_count;
  double link_bandwidth, link_latency; /* inside a machine: bytes per second, seconds */
  double net_bandwidth, net_latency;   /* between machines */
  double forward_flops, backward_flops;
  int32_t separate_backward; /* bytes of flashcore_distributed_backward: q, k, v, out and lse too */
  int32_t by_heads;          /* decode: as in flashcore_decode_options */
  double memory_bandwidth;   /* decode: bytes per second of device memory */
} flashcore_distributed_problem;

/* The scheme and the number of ranks that divide the heads. Reads no rows and no speeds. reason may
 * be NULL; at most capacity bytes are written, terminated. */
FLASHCORE_C_API int32_t flashcore_distributed_choose(const flashcore_distributed_problem* problem,
                                                     int32_t* scheme, int32_t* head_ranks,
                                                     char* reason, size_t capacity,
                                                     flashcore_error* error);

/* The plan as JSON: scheme, reason, steps with bytes and seconds, the text of explain(), and, if
 * rank is not negative, the bytes of each step of that rank. Writes at most capacity bytes,
 * terminated; *needed is the full size. */
FLASHCORE_C_API int32_t flashcore_distributed_plan(const flashcore_distributed_problem* problem,
                                                   int32_t rank, char* json, size_t capacity,
                                                   size_t* needed, flashcore_error* error);

/* The nominal speeds of links and devices as JSON; see flashcore::speeds_json(). */
FLASHCORE_C_API int32_t flashcore_distributed_speeds(char* json, size_t capacity, size_t* needed,
                                                     flashcore_error* error);

/* The engine that moves data. See flashcore::Comm in distributed.h. */
typedef struct flashcore_comm {
  size_t struct_size; /* set by the caller: sizeof(flashcore_comm) */
  void* context;
  int32_t rank, size;
  int32_t (*sendrecv)(void* context, const void* send, size_t send_bytes, int32_t to, void* recv,
                      size_t recv_bytes, int32_t from, void* stream);
  int32_t (*all_to_all)(void* context, const void* send, const size_t* send_bytes, void* recv,
                        const size_t* recv_bytes, void* stream);
  int32_t (*all_gather)(void* context, const void* send, void* recv, const size_t* recv_bytes,
                        void* stream);
} flashcore_comm;

typedef struct flashcore_distributed_options {
  size_t struct_size; /* set by the caller: sizeof(flashcore_distributed_options) */
  int32_t scheme;
  int32_t sharding;
  int32_t ranks_per_node; /* 0: all ranks are in one machine */
  int32_t head_ranks;
  const int64_t* documents; /* packed: first rows, then the length, in host memory; or NULL */
  size_t documents_count;
} flashcore_distributed_options;

/* Attention of this rank's rows over the keys of all ranks. Every rank makes the call. options may
 * be NULL. params: q, k, v, out, lse, sinks, causal, the window, scale, softcap, reproducibility,
 * layout and stream apply. */
FLASHCORE_C_API int32_t flashcore_distributed_attention(
    const flashcore_comm* comm, const flashcore_params* params,
    const flashcore_distributed_options* options, flashcore_error* error);

/* The bytes of workspace that flashcore_distributed_backward needs on a rank. The problem is that
 * of the forward call; its speeds are not read. */
FLASHCORE_C_API int32_t flashcore_distributed_backward_workspace(
    const flashcore_distributed_problem* problem, int32_t rank, flashcore_device device,
    size_t* bytes, flashcore_error* error);

/* Gradients of flashcore_distributed_attention: see flashcore::distributed_backward. Every rank
 * makes the call. params: the forward call with out and lse, dout, dlse (or NULL), dq, dk, dv,
 * dsinks (or NULL). Without a workspace the call allocates its buffers. */
FLASHCORE_C_API int32_t flashcore_distributed_backward(const flashcore_comm* comm,
                                                       const flashcore_backward_params* params,
                                                       const flashcore_distributed_options* options,
                                                       flashcore_error* error);

typedef struct flashcore_decode_options {
  size_t struct_size; /* set by the caller: sizeof(flashcore_decode_options) */
  int64_t interleave; /* key p is on rank (p / interleave) % size */
  int32_t by_heads;   /* 1: each rank gets its heads alone; 0: the whole result */
} flashcore_decode_options;

/* A few new queries over a KV cache whose keys are divided between ranks. lengths, in host memory,
 * has the whole length of each sequence. options may be NULL. */
FLASHCORE_C_API int32_t flashcore_distributed_decode(const flashcore_comm* comm,
                                                     const flashcore_params* params,
                                                     const int32_t* lengths,
                                                     const flashcore_decode_options* options,
                                                     flashcore_error* error);

#ifdef __cplusplus
}
#endif
#endif /* FLASHCORE_DISTRIBUTED_C_H_ */
