// Random problems include tall and large shapes, empty sequences and hidden tiles.
// tiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "verify/inputs/case_lengths.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

/// The kinds of problems, out of those that the draws must produce, that this problem belongs to.
std::vector<std::string> kinds_of(const CaseSpec& s, const KernelInfo& kernel) {
  std::vector<std::string> kinds;
  const auto add = [&](bool applies, const char* kind) {
    if (applies) kinds.emplace_back(kind);
  };
  const Options& o = s.options;
  const bool tall = s.kv_len > 0 && s.q_len >= 4 * s.kv_len && s.q_len > 3 * kernel.tile_q;
  const std::int64_t rows = s.batch * s.q_heads * s.q_len;
  add(tall && o.causal, "tall and causal");
  add(tall && o.window_left >= 0 && o.window_right >= 0, "tall with a window on both sides");
  add(rows >= 10'000 && rows <= 110'000, "large");
  add(o.window_left >= 0 && o.window_left <= 16 && s.kv_len > 4 * kernel.tile_k,
      "tiles hidden left of a window");
  add(o.window_right >= 0 && o.window_right <= 16 && s.kv_len > 4 * kernel.tile_k,
      "tiles hidden right of a window");
  const CaseLengths lengths = draw_lengths(s);
  const auto has = [](const std::vector<std::int32_t>& values, std::int64_t value) {
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  if (s.used_k && !s.kv_varlen && s.kv_len > 1) {
    const bool full = has(lengths.used_k, s.kv_len);
    add(full && has(lengths.used_k, 0), "sequences with no and with all keys in use");
    add(full && has(lengths.used_k, 1), "sequences with one and with all keys in use");
  }
  const auto has_empty = [](const std::vector<std::int32_t>& ends) {
    return std::adjacent_find(ends.begin(), ends.end()) != ends.end() && ends.back() > 0;
  };
  add(has_empty(lengths.q_ends), "an empty query sequence among others");
  add(has_empty(lengths.k_ends), "an empty key sequence among others");
  if (s.q_start && !s.q_varlen && tall) {
    const std::int64_t start = lengths.q_start.front();
    add(start < -kernel.tile_q, "a query tile before the first key");
    add(start + s.q_len > s.kv_len + kernel.tile_q && o.window_left >= 0,
        "a query tile whose window is past the last key");
  }
  return kinds;
}

void expect_every_kind(const char* id, std::uint64_t problems) {
  const KernelInfo& kernel = *find_kernel(id);
  std::map<std::string, int> counts;
  for (std::uint64_t i = 0; i < problems; ++i) {
    for (const std::string& kind : kinds_of(random_case(kernel, 1, i), kernel)) ++counts[kind];
  }
  for (const char* kind :
       {"tall and causal", "tall with a window on both sides", "large",
        "tiles hidden left of a window", "tiles hidden right of a window",
        "sequences with no and with all keys in use", "sequences with one and with all keys in use",
        "an empty query sequence among others", "an empty key sequence among others",
        "a query tile before the first key", "a query tile whose window is past the last key"}) {
    EXPECT_GT(counts[kind], 0) << id << ": " << kind;
  }
}

TEST(CaseDraws, PersistentKernelsGetEveryKind) { expect_every_kind("fwd_sm90_f16_d64_q128", 1000); }
TEST(CaseDraws, OtherKernelsGetEveryKind) {
  expect_every_kind("fwd_generic_f32", 4000);
  expect_every_kind("fwd_sm80_bf16_d128_q128", 4000);
}

TEST(CaseDraws, ALowWorkTargetLimitsTheRows) {
  const KernelInfo& kernel = *find_kernel("fwd_generic_f32");
  for (std::uint64_t i = 0; i < 4000; ++i) {
    const CaseSpec s =
        random_case(kernel, 1, i, {.target_work = 1 << 15, .sigma = {}, .splits = {}});
    EXPECT_LE(s.batch * s.q_heads * s.q_len, 4000) << to_string(s);
  }
}

TEST(CaseDraws, TheTensorsContainTheLengths) {
  const KernelInfo& kernel = *find_kernel("fwd_generic_f32");
  int used = 0, varlen = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const CaseSpec s =
        random_case(kernel, 3, i, {.target_work = 1 << 12, .sigma = {}, .splits = {}});
    const CaseMemory memory(s);
    const CaseLengths lengths = draw_lengths(s);
    const auto expect = [](const TensorView& view, const std::vector<std::int32_t>& values) {
      const auto* data = static_cast<const std::int32_t*>(view.data);
      EXPECT_EQ(std::vector<std::int32_t>(data, data + view.shape[0]), values);
    };
    const Tensors& t = memory.tensors();
    if (s.used_k) expect(t.seqused_k, lengths.used_k), ++used;
    if (s.q_varlen) expect(t.cu_seqlens_q, lengths.q_ends), ++varlen;
    if (s.kv_varlen) expect(t.cu_seqlens_k, lengths.k_ends), ++varlen;
    if (s.q_start) expect(t.q_start, lengths.q_start);
    if (s.k_start) expect(t.k_start, lengths.k_start);
  }
  EXPECT_GT(used, 0);
  EXPECT_GT(varlen, 0);
}

TEST(CaseDraws, UsedLengthsOfTheSpecAreUsed) {
  CaseSpec s;
  s.batch = 3;
  s.kv_len = 70;
  s.used_k = true;
  s.used_lengths = {70, 0, 1};
  EXPECT_EQ(draw_lengths(s).used_k, (std::vector<std::int32_t>{70, 0, 1}));
}

}  // namespace
}  // namespace flashcore::verify
