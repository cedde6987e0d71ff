/* A C99 user of an installed FlashCore. Compares one call with a direct evaluation of the formula.
 */
#include <flashcore/flashcore.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, LENGTH = 19, DIM = 8, COUNT = HEADS * LENGTH * DIM };

static float q[COUNT], k[COUNT], v[COUNT], out[COUNT];

static double expected(int head, int query, int column) {
  const float* base_q = q + (head * LENGTH + query) * DIM;
  double sum = 0, weighted = 0;
  int key, d;
  for (key = 0; key <= query; ++key) {
    double score = 0;
    for (d = 0; d < DIM; ++d) score += (double)base_q[d] * k[(head * LENGTH + key) * DIM + d];
    score = exp(score / sqrt((double)DIM));
    sum += score;
    weighted += score * v[(head * LENGTH + key) * DIM + column];
  }
  return weighted / sum;
}

static flashcore_tensor tensor(float* data, int64_t* shape) {
  flashcore_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = FLASHCORE_CPU;
  t.dtype.code = FLASHCORE_FLOAT;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.ndim = 4;
  t.shape = shape;
  return t;
}

static int fail(const char* what, const flashcore_error* error) {
  fprintf(stderr, "%s: %s\n", what, error->message);
  return 1;
}

int main(void) {
  int64_t shape[4] = {1, HEADS, LENGTH, DIM};
  flashcore_tensor tq = tensor(q, shape), tk = tensor(k, shape), tv = tensor(v, shape),
                   to = tensor(out, shape);
  flashcore_params params;
  flashcore_plan_info plan;
  flashcore_error error;
  char* memory;
  double largest = 0;
  int i, head, query, column;

  for (i = 0; i < COUNT; ++i) {
    q[i] = (float)sin(1.0 + i);
    k[i] = (float)sin(2.0 + 3 * i);
    v[i] = (float)sin(4.0 + 5 * i);
  }
  flashcore_params_init(&params, sizeof params);
  params.q = &tq;
  params.k = &tk;
  params.v = &tv;
  params.causal = 1;
  memset(&plan, 0, sizeof plan);
  plan.struct_size = sizeof plan;
  if (flashcore_plan(&params, &plan, &error) != FLASHCORE_INVALID_ARGUMENT ||
      strstr(error.message, "out") == NULL) {
    return fail("a call without out must be refused with a message that names out", &error);
  }
  params.out = &to;
  if (flashcore_plan(&params, &plan, &error) != FLASHCORE_OK) return fail("plan", &error);
  memory = malloc(plan.workspace_bytes + 256);
  if (memory == NULL) return 1;
  params.workspace = memory + (256 - (uintptr_t)memory % 256);
  params.workspace_bytes = plan.workspace_bytes;
  if (flashcore_workspace_init(params.workspace, params.workspace_bytes, tq.device, NULL, &error) !=
      FLASHCORE_OK) {
    return fail("workspace_init", &error);
  }
  if (flashcore_attention(&params, &error) != FLASHCORE_OK) return fail("attention", &error);
  free(memory);

  for (head = 0; head < HEADS; ++head) {
    for (query = 0; query < LENGTH; ++query) {
      for (column = 0; column < DIM; ++column) {
        const double got = out[(head * LENGTH + query) * DIM + column];
        const double difference = fabs(got - expected(head, query, column));
        if (!(difference <= largest)) largest = difference; /* NaN counts */
      }
    }
  }
  printf("C consumer: flashcore %s, %s, largest error %.1e\n", flashcore_version(), plan.kernel,
         largest);
  return largest < 1e-6 ? 0 : 1;
}
