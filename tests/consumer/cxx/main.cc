// A C++ user of an installed FlashCore. Compares one call with a direct evaluation of the formula.
#include <flashcore/attention.h>
#include <flashcore/flashcore.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace fc = flashcore;

namespace {

constexpr int kQueryHeads = 4, kHeads = 2, kQueries = 7, kKeys = 19, kDim = 8, kColumns = 5;

std::vector<float> wave(int count, double phase) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) values[i] = static_cast<float>(std::sin(phase + 3.0 * i));
  return values;
}

double expected(const std::vector<float>& q, const std::vector<float>& k,
                const std::vector<float>& v, int head, int query, int column) {
  const int kv_head = head / (kQueryHeads / kHeads);
  double sum = 0, weighted = 0;
  for (int key = 0; key < kKeys; ++key) {
    double score = 0;
    for (int d = 0; d < kDim; ++d) {
      score +=
          double{q[(head * kQueries + query) * kDim + d]} * k[(kv_head * kKeys + key) * kDim + d];
    }
    const double weight = std::exp(score / std::sqrt(double{kDim}));
    sum += weight;
    weighted += weight * v[(kv_head * kKeys + key) * kColumns + column];
  }
  return weighted / sum;
}

int fail(const fc::Status& status) {
  std::fprintf(stderr, "%s: %s\n", fc::to_string(status.code()), status.message().c_str());
  return 1;
}

}  // namespace

int main() {
  const auto q = wave(kQueryHeads * kQueries * kDim, 1), k = wave(kHeads * kKeys * kDim, 2);
  const auto v = wave(kHeads * kKeys * kColumns, 3);
  std::vector<float> out(kQueryHeads * kQueries * kColumns);
  const fc::Tensors tensors{
      .q = fc::view(q.data(), fc::DType::f32, {1, kQueryHeads, kQueries, kDim}),
      .k = fc::view(k.data(), fc::DType::f32, {1, kHeads, kKeys, kDim}),
      .v = fc::view(v.data(), fc::DType::f32, {1, kHeads, kKeys, kColumns}),
      .out = fc::view(out.data(), fc::DType::f32, {1, kQueryHeads, kQueries, kColumns})};
  const auto problem = fc::make_problem(tensors, {});
  if (!problem.ok()) return fail(problem.status());
  const auto plan = fc::make_plan(*problem, *fc::device_info({}));
  if (!plan.ok()) return fail(plan.status());
  const fc::Workspace workspace{std::aligned_alloc(256, plan->workspace_bytes),
                                plan->workspace_bytes};
  if (const auto status = fc::workspace_init(workspace); !status.ok()) return fail(status);
  if (const auto status = fc::run(*plan, tensors, workspace); !status.ok()) return fail(status);
  std::free(workspace.data);

  double largest = 0;
  for (int i = 0; i < kQueryHeads * kQueries * kColumns; ++i) {
    const int head = i / (kQueries * kColumns), query = i / kColumns % kQueries;
    const double difference = std::abs(out[i] - expected(q, k, v, head, query, i % kColumns));
    if (!(difference <= largest)) largest = difference;  // NaN counts
  }
  std::printf("C++ consumer: flashcore %s, %s, largest error %.1e\n%s", flashcore_version(),
              plan->kernel->id, largest, fc::explain(*plan).c_str());
  return largest < 1e-6 ? 0 : 1;
}
