/* A program compiled against the header of 0.1.0 (flashcore/flashcore.h in this folder) and linked
 * with the current library. Every C function accepts the structs of 0.1.0 and gives the same
 * results. */
#include <flashcore/flashcore.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Only the header of 0.1.0 declares this constant. */
enum { USES_THE_OLD_HEADER = FLASHCORE_MAX_PYTHON_ARRAYS };

enum { HEADS = 2, LENGTH = 19, CAPACITY = 24, DIM = 8, ROWS = HEADS * LENGTH };

static float q[ROWS * DIM], k[HEADS * CAPACITY * DIM], v[HEADS * CAPACITY * DIM];
static float out[ROWS * DIM], lse[ROWS], partial_out[ROWS * DIM], partial_lse[ROWS];
static float merged[ROWS * DIM], sinks[HEADS] = {0.5f, -0.25f};
static int32_t used[1] = {LENGTH};
static union {
  char bytes[1 << 20];
  double align;
} memory;
static flashcore_error error;
static int failures = 0;

static void check(int passed, const char* what) {
  if (passed) return;
  fprintf(stderr, "%s: %s\n", what, error.message);
  ++failures;
}

static flashcore_tensor tensor(void* data, int code, int bits, int rank, int64_t* shape) {
  flashcore_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = FLASHCORE_CPU;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = (uint8_t)bits;
  t.dtype.lanes = 1;
  t.ndim = rank;
  t.shape = shape;
  return t;
}

/* Causal attention with softcap 3 and the sink of the head. */
static double expected(int head, int query, int column) {
  double sum = exp(sinks[head]), weighted = 0;
  int key, d;
  for (key = 0; key <= query; ++key) {
    double score = 0;
    for (d = 0; d < DIM; ++d) {
      score += (double)q[(head * LENGTH + query) * DIM + d] * k[(head * CAPACITY + key) * DIM + d];
    }
    score = exp(3 * tanh(score / sqrt((double)DIM) / 3));
    sum += score;
    weighted += score * v[(head * CAPACITY + key) * DIM + column];
  }
  return weighted / sum;
}

static double largest_error(const float* got) {
  double largest = 0;
  int head, query, column;
  for (head = 0; head < HEADS; ++head) {
    for (query = 0; query < LENGTH; ++query) {
      for (column = 0; column < DIM; ++column) {
        const double want = expected(head, query, column);
        const double difference = fabs(got[(head * LENGTH + query) * DIM + column] - want);
        if (!(difference <= largest)) largest = difference; /* NaN counts */
      }
    }
  }
  return largest;
}

static void* aligned_memory(void) { return memory.bytes + (256 - (uintptr_t)memory.bytes % 256); }

static flashcore_params params_of(const flashcore_tensor* tq, const flashcore_tensor* tk,
                                  const flashcore_tensor* tv, const flashcore_tensor* to,
                                  const flashcore_tensor* tl) {
  flashcore_params p;
  flashcore_params_init(&p, sizeof p);
  p.q = tq;
  p.k = tk;
  p.v = tv;
  p.out = to;
  p.lse = tl;
  p.causal = 1;
  p.softcap = 3;
  p.workspace = aligned_memory();
  p.workspace_bytes = sizeof memory.bytes - 256;
  return p;
}

static void test_append(flashcore_tensor* tk, flashcore_tensor* tv) {
  static float k_new[ROWS * DIM], v_new[ROWS * DIM];
  static int32_t none[1] = {0};
  int64_t new_shape[4] = {1, HEADS, LENGTH, DIM}, one[1] = {1};
  flashcore_tensor tk_new = tensor(k_new, FLASHCORE_FLOAT, 32, 4, new_shape);
  flashcore_tensor tv_new = tensor(v_new, FLASHCORE_FLOAT, 32, 4, new_shape);
  flashcore_tensor before = tensor(none, FLASHCORE_INT, 32, 1, one);
  flashcore_append_params p;
  int i;
  for (i = 0; i < ROWS * DIM; ++i) {
    k_new[i] = (float)sin(2.0 + 3 * i);
    v_new[i] = (float)sin(4.0 + 5 * i);
  }
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.k_new = &tk_new;
  p.v_new = &tv_new;
  p.k = tk;
  p.v = tv;
  p.used_k = &before;
  check(flashcore_append(&p, &error) == FLASHCORE_OK, "append");
  check(k[CAPACITY * DIM] == k_new[LENGTH * DIM], "append writes the second head");
}

static void test_attention(const flashcore_params* base, const flashcore_tensor* ts) {
  flashcore_params p = *base;
  flashcore_plan_info plan;
  char text[64];
  size_t needed = 0;
  memset(&plan, 0, sizeof plan);
  plan.struct_size = sizeof plan;
  p.sinks = ts;
  check(flashcore_plan(&p, &plan, &error) == FLASHCORE_OK, "plan");
  check(plan.work_items > 0 && plan.splits >= 1 && plan.workspace_bytes <= p.workspace_bytes &&
            plan.kernel != NULL && plan.family != NULL,
        "plan_info");
  check(flashcore_explain(&p, text, sizeof text, &needed, &error) == FLASHCORE_OK && needed > 64,
        "explain");
  check(flashcore_attention(&p, &error) == FLASHCORE_OK, "attention");
  check(largest_error(out) < 1e-6, "attention computes the formula");
}

/* A partial result has no sinks. The merge adds them. */
static void test_merge(const flashcore_params* base, const flashcore_tensor* ts) {
  int64_t shape[4] = {1, HEADS, LENGTH, DIM}, rows[3] = {1, HEADS, LENGTH};
  flashcore_tensor part = tensor(partial_out, FLASHCORE_FLOAT, 32, 4, shape);
  flashcore_tensor part_lse = tensor(partial_lse, FLASHCORE_FLOAT, 32, 3, rows);
  flashcore_tensor to = tensor(merged, FLASHCORE_FLOAT, 32, 4, shape);
  flashcore_params p = *base;
  flashcore_merge_params m;
  p.out = &part;
  p.lse = &part_lse;
  p.sinks = ts;
  p.partial = 1;
  check(flashcore_attention(&p, &error) == FLASHCORE_OK, "partial attention");
  check(largest_error(partial_out) > 1e-3, "a partial result has no sinks");
  memset(&m, 0, sizeof m);
  m.struct_size = sizeof m;
  m.outs = &part;
  m.lses = &part_lse;
  m.parts = 1;
  m.out = &to;
  m.sinks = ts;
  check(flashcore_merge(&m, &error) == FLASHCORE_OK, "merge");
  check(largest_error(merged) < 1e-6, "merge computes the formula");
}

static void test_quantize(void) {
  static float from[64], back[64], scale[1];
  static int8_t quantized[64];
  int64_t shape[2] = {8, 8}, one[1] = {1};
  flashcore_tensor wide = tensor(from, FLASHCORE_FLOAT, 32, 2, shape);
  flashcore_tensor narrow = tensor(quantized, FLASHCORE_INT, 8, 2, shape);
  flashcore_tensor again = tensor(back, FLASHCORE_FLOAT, 32, 2, shape);
  flashcore_tensor factor = tensor(scale, FLASHCORE_FLOAT, 32, 1, one);
  flashcore_quant_params p;
  int i;
  for (i = 0; i < 64; ++i) from[i] = (float)sin(1.0 + i);
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.from = &wide;
  p.to = &narrow;
  p.scale = &factor;
  check(flashcore_quantize(&p, &error) == FLASHCORE_OK, "quantize");
  p.from = &narrow;
  p.to = &again;
  check(flashcore_dequantize(&p, &error) == FLASHCORE_OK, "dequantize");
  for (i = 0; i < 64; ++i) check(fabs(back[i] - from[i]) <= 0.51 * scale[0], "round trip");
}

static void test_errors(const flashcore_params* base) {
  flashcore_params p = *base;
  const int32_t set = 1;
  p.window_left = -7;
  check(flashcore_attention(&p, &error) == FLASHCORE_INVALID_ARGUMENT &&
            error.code == FLASHCORE_INVALID_ARGUMENT &&
            strstr(error.message, "window_left") != NULL,
        "an invalid argument is named");
  p = *base;
  p.cancel = &set;
  check(flashcore_attention(&p, &error) == FLASHCORE_CANCELLED, "cancel");
  check(strcmp(flashcore_status_name(FLASHCORE_CANCELLED), "cancelled") == 0, "status_name");
  /* The struct_size of a program compiled before `cancel` was added. */
  p.struct_size = offsetof(flashcore_params, cancel);
  check(flashcore_attention(&p, &error) == FLASHCORE_OK, "params without cancel");
}

int main(void) {
  int64_t q_shape[4] = {1, HEADS, LENGTH, DIM}, kv_shape[4] = {1, HEADS, CAPACITY, DIM};
  int64_t rows[3] = {1, HEADS, LENGTH}, heads[1] = {HEADS}, one[1] = {1};
  flashcore_tensor tq = tensor(q, FLASHCORE_FLOAT, 32, 4, q_shape);
  flashcore_tensor tk = tensor(k, FLASHCORE_FLOAT, 32, 4, kv_shape);
  flashcore_tensor tv = tensor(v, FLASHCORE_FLOAT, 32, 4, kv_shape);
  flashcore_tensor to = tensor(out, FLASHCORE_FLOAT, 32, 4, q_shape);
  flashcore_tensor tl = tensor(lse, FLASHCORE_FLOAT, 32, 3, rows);
  flashcore_tensor ts = tensor(sinks, FLASHCORE_FLOAT, 32, 1, heads);
  flashcore_tensor tu = tensor(used, FLASHCORE_INT, 32, 1, one);
  flashcore_params base;
  uint64_t capture = 1;
  int i;
  for (i = 0; i < ROWS * DIM; ++i) q[i] = (float)sin(1.0 + i);
  for (i = 0; i < HEADS * CAPACITY * DIM; ++i) k[i] = v[i] = (float)NAN; /* past used_k */
  test_append(&tk, &tv);
  base = params_of(&tq, &tk, &tv, &to, &tl);
  base.used_k = &tu;
  check(flashcore_workspace_init(base.workspace, base.workspace_bytes, tq.device, NULL, &error) ==
            FLASHCORE_OK,
        "workspace_init");
  test_attention(&base, &ts);
  test_merge(&base, &ts);
  test_quantize();
  test_errors(&base);
  check(flashcore_workspace_status(base.workspace, base.workspace_bytes, tq.device, NULL, &error) ==
            FLASHCORE_OK,
        "workspace_status");
  check(
      flashcore_capture_id(tq.device, NULL, &capture, NULL, &error) == FLASHCORE_OK && capture == 0,
      "capture_id");
  check(flashcore_source_fingerprint("cpu") != NULL && flashcore_cuda_device_count(NULL) >= 0,
        "fingerprint, device count");
  /* The functions for Python are exported. */
  check(flashcore_python_run != NULL && flashcore_python_new != NULL &&
            flashcore_python_attention != NULL && flashcore_python_merge != NULL &&
            flashcore_python_append != NULL && flashcore_python_quantize != NULL &&
            flashcore_python_dequantize != NULL && USES_THE_OLD_HEADER == 15,
        "exported symbols");
  printf("a program of 0.1.0 with flashcore %s: %d failures\n", flashcore_version(), failures);
  return failures == 0 ? 0 : 1;
}
