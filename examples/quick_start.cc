// Causal grouped-query attention on the CPU: 8 query heads share 2 KV heads.
#include <flashcore/attention.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace fc = flashcore;

int main() {
  std::vector<float> q(8 * 512 * 64, 0.5f), k(2 * 512 * 64, 0.25f), v(2 * 512 * 64), out(q.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 64 % 512);  // the key

  const fc::Tensors tensors{.q = fc::view(q.data(), fc::DType::f32, {1, 8, 512, 64}),
                            .k = fc::view(k.data(), fc::DType::f32, {1, 2, 512, 64}),
                            .v = fc::view(v.data(), fc::DType::f32, {1, 2, 512, 64}),
                            .out = fc::view(out.data(), fc::DType::f32, {1, 8, 512, 64})};
  const auto problem = fc::make_problem(tensors, {.causal = true});
  if (!problem.ok()) return std::puts(problem.status().message().c_str()), 1;
  const auto plan = fc::make_plan(*problem, *fc::device_info({}));
  if (!plan.ok()) return std::puts(plan.status().message().c_str()), 1;

  // The caller owns the workspace: allocate and initialise it once, run as often as you like.
  const fc::Workspace workspace{std::aligned_alloc(256, plan->workspace_bytes),
                                plan->workspace_bytes};
  if (const auto status = fc::workspace_init(workspace); !status.ok()) return 1;
  if (const auto status = fc::run(*plan, tensors, workspace); !status.ok()) {
    return std::puts(status.message().c_str()), 1;
  }
  std::printf("%s: query 511 averages keys 0 to 511: %.2f\n", plan->kernel->id, out[511 * 64]);
  std::free(workspace.data);
}
