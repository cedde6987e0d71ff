// A paged KV cache: two completions of one prompt. Both sequences share the full pages of the
// prompt. Then each sequence appends to its own pages, taken from a free list.
#include <flashcore/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace fc = flashcore;

namespace {

constexpr int kBatch = 2, kQueryHeads = 8, kHeads = 2, kDim = 64;
constexpr int kPageSize = 16, kPages = 24, kMaxPages = 8;  // pages in total and per sequence
constexpr int kPrompt = 40, kSteps = 50;                   // the prompt fills 2.5 pages
constexpr int kLength = kPrompt + kSteps;

/// Prints the message and exits. An engine would return the Status.
void require(const fc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", fc::to_string(status.code()), status.message().c_str());
  std::exit(1);
}

/// Plans and runs one call. An engine reuses plan and workspace: see decode_loop.cc.
void attend(const fc::Tensors& tensors) {
  const auto problem = fc::make_problem(tensors, {.causal = true});
  require(problem.status());
  const auto plan = fc::make_plan(*problem, *fc::device_info({}));
  require(plan.status());
  void* memory = std::aligned_alloc(256, plan->workspace_bytes);
  const fc::Workspace workspace{memory, plan->workspace_bytes};
  require(fc::workspace_init(workspace));
  require(fc::run(*plan, tensors, workspace));
  std::free(memory);
}

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(generator); });
  return values;
}

/// Rows [first, first + count) of a [batch, heads, length, dim] tensor.
fc::TensorView rows(fc::TensorView tensor, int first, int count) {
  tensor.data = static_cast<float*>(tensor.data) + first * tensor.strides[2];
  tensor.shape[2] = count;
  return tensor;
}

}  // namespace

int main() {
  // The values that a model would compute token by token. Both sequences have the same prompt.
  auto k = random_floats(kBatch * kHeads * kLength * kDim, 1);
  auto v = random_floats(k.size(), 2);
  for (std::size_t head = 0; head < kHeads; ++head) {
    const std::size_t first = head * kLength * kDim, second = (kHeads + head) * kLength * kDim;
    std::copy_n(&k[first], kPrompt * kDim, &k[second]);
    std::copy_n(&v[first], kPrompt * kDim, &v[second]);
  }
  const auto q = random_floats(kBatch * kQueryHeads * kLength * kDim, 3);
  const auto all_k = fc::view(k.data(), fc::DType::f32, {kBatch, kHeads, kLength, kDim});
  const auto all_v = fc::view(v.data(), fc::DType::f32, {kBatch, kHeads, kLength, kDim});
  const auto all_q = fc::view(q.data(), fc::DType::f32, {kBatch, kQueryHeads, kLength, kDim});

  // The pages are initially NaN: rows without a key are never read. -1: no page.
  std::vector<float> k_pages(kPages * kPageSize * kHeads * kDim, NAN), v_pages(k_pages);
  std::vector<std::int32_t> table(kBatch * kMaxPages, -1), used(kBatch, 0), free_pages(kPages);
  for (int i = 0; i < kPages; ++i) free_pages[i] = i;
  std::shuffle(free_pages.begin(), free_pages.end(), std::mt19937(4));
  const auto take_page = [&](int b, int slot) {
    table[b * kMaxPages + slot] = free_pages.back();
    free_pages.pop_back();
  };
  fc::AppendTensors cache{
      .k = fc::view(k_pages.data(), fc::DType::f32, {kPages, kPageSize, kHeads, kDim}),
      .v = fc::view(v_pages.data(), fc::DType::f32, {kPages, kPageSize, kHeads, kDim}),
      .seqused_k = fc::view(used.data(), fc::DType::i32, {kBatch}),
      .block_table = fc::view(table.data(), fc::DType::i32, {kBatch, kMaxPages})};

  // The full pages of the prompt are written once, for the first sequence (a batch of one), and
  // shared with the second.
  constexpr int kShared = kPrompt / kPageSize;
  for (int slot = 0; slot < kShared; ++slot) {
    take_page(0, slot);
    table[kMaxPages + slot] = table[slot];
  }
  fc::AppendTensors shared = cache;
  shared.k_new = rows(all_k, 0, kShared * kPageSize);
  shared.v_new = rows(all_v, 0, kShared * kPageSize);
  for (auto* view : {&shared.k_new, &shared.v_new, &shared.seqused_k, &shared.block_table}) {
    view->shape[0] = 1;
  }
  require(fc::append(shared));
  std::fill(used.begin(), used.end(), kShared * kPageSize);

  // Appends the rest of the prompt, then one token per step, to pages of each sequence.
  std::vector<float> out(kBatch * kQueryHeads * kLength * kDim, NAN);
  const auto all_out = fc::view(out.data(), fc::DType::f32, {kBatch, kQueryHeads, kLength, kDim});
  for (int have = used[0]; have < kLength;) {
    const int now = std::max(have + 1, kPrompt);
    for (int b = 0; b < kBatch; ++b) {
      for (int slot = (have + kPageSize - 1) / kPageSize; slot * kPageSize < now; ++slot) {
        take_page(b, slot);
      }
    }
    cache.k_new = rows(all_k, have, now - have);
    cache.v_new = rows(all_v, have, now - have);
    require(fc::append(cache));
    std::fill(used.begin(), used.end(), now);
    attend({.q = rows(all_q, have, now - have),
            .k = cache.k,
            .v = cache.v,
            .out = rows(all_out, have, now - have),
            .seqused_k = cache.seqused_k,
            .block_table = cache.block_table});
    have = now;
  }

  // One causal attention over dense keys gives the same result.
  std::vector<float> want(out.size());
  attend({.q = all_q,
          .k = all_k,
          .v = all_v,
          .out = fc::view(want.data(), fc::DType::f32, {kBatch, kQueryHeads, kLength, kDim})});
  float largest = 0;
  for (int head = 0; head < kBatch * kQueryHeads; ++head) {
    for (int i = kShared * kPageSize * kDim; i < kLength * kDim; ++i) {
      const float difference =
          std::abs(out[head * kLength * kDim + i] - want[head * kLength * kDim + i]);
      // NaN counts as a difference.
      if (!(difference <= largest)) largest = difference;
    }
  }
  std::printf("%d sequences of %d keys in %zu pages of %d, %d of them shared\n", kBatch, kLength,
              kPages - free_pages.size(), kPageSize, kShared);
  std::printf("largest difference to one attention over dense keys: %.1e\n", largest);
  return largest < 1e-5f ? 0 : 1;
}
