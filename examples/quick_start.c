// Causal self-attention on the CPU through the C ABI.
#include <flashcore/flashcore.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const flashcore_error* error) {
  fprintf(stderr, "flashcore: %s\n", error->message);
  return 1;
}

int main(void) {
  int64_t shape[4] = {1, 8, 512, 64};  // batch, heads, length, head_dim
  const size_t count = 8 * 512 * 64;
  float* data = malloc(4 * count * sizeof *data);  // q, k, v, out
  for (size_t i = 0; i < 3 * count; ++i) data[i] = (float)rand() / RAND_MAX - 0.5f;

  flashcore_tensor t[4] = {{0}};
  for (int i = 0; i < 4; ++i) {
    t[i].data = data + i * count;
    t[i].device.device_type = FLASHCORE_CPU;
    t[i].dtype = (flashcore_dtype){FLASHCORE_FLOAT, 32, 1};
    t[i].ndim = 4;
    t[i].shape = shape;  // strides stay NULL: compact
  }
  flashcore_params p;
  flashcore_params_init(&p, sizeof p);
  p.q = &t[0], p.k = &t[1], p.v = &t[2], p.out = &t[3], p.causal = 1;

  flashcore_error error;
  flashcore_plan_info plan = {.struct_size = sizeof plan};
  if (flashcore_plan(&p, &plan, &error) != FLASHCORE_OK) return fail(&error);
  p.workspace = aligned_alloc(256, plan.workspace_bytes);
  p.workspace_bytes = plan.workspace_bytes;
  if (flashcore_workspace_init(p.workspace, p.workspace_bytes, t[0].device, NULL, &error) ||
      flashcore_attention(&p, &error))
    return fail(&error);
  printf("%s: query 0 sees key 0 alone: out %.6f, v %.6f\n", plan.kernel, data[3 * count],
         data[2 * count]);
  return free(p.workspace), free(data), 0;
}
