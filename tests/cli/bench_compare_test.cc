// compare_results(): faster means a smaller time. Tests changes in both directions.
#include "bench/bench_compare.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "command_error.h"

namespace flashcore::tool {
namespace {

Json row(const char* name, double us, double spread, const char* kernel = "k") {
  return {{"kind", "fwd"}, {"name", name},    {"dtype", "f32"},   {"batch", 1},
          {"q_heads", 1},  {"kv_heads", 1},   {"q_len", 64},      {"kv_len", 64},
          {"head_dim", 8}, {"causal", false}, {"cold_l2", false}, {"kernel", kernel},
          {"us", us},      {"spread", spread}};
}

Json result(std::initializer_list<Json> rows) { return {{"device", "d"}, {"rows", rows}}; }

Verdict verdict(double old_us, double old_spread, double new_us, double new_spread) {
  const BenchChanges changes = compare_results(result({row("a", old_us, old_spread)}),
                                               result({row("a", new_us, new_spread)}));
  EXPECT_EQ(changes.rows.size(), 1u);
  return changes.rows.at(0).verdict;
}

TEST(Compare, LargerTimeIsSlower) { EXPECT_EQ(verdict(100, 0.01, 120, 0.01), Verdict::slower); }
TEST(Compare, SmallerTimeIsFaster) { EXPECT_EQ(verdict(100, 0.01, 80, 0.01), Verdict::faster); }
TEST(Compare, SameTimeIsNoise) { EXPECT_EQ(verdict(100, 0.01, 100, 0.01), Verdict::noise); }
TEST(Compare, ThreePercentIsNoise) {
  EXPECT_EQ(verdict(100, 0, 102.9, 0), Verdict::noise);
  EXPECT_EQ(verdict(100, 0, 97.1, 0), Verdict::noise);
  EXPECT_EQ(verdict(100, 0, 103.1, 0), Verdict::slower);
  EXPECT_EQ(verdict(100, 0, 96.9, 0), Verdict::faster);
}
TEST(Compare, EitherSpreadHidesAChange) {
  EXPECT_EQ(verdict(100, 0.3, 120, 0.01), Verdict::noise);
  EXPECT_EQ(verdict(100, 0.01, 120, 0.3), Verdict::noise);
}

TEST(Compare, KernelOfACaseMayChange) {
  const BenchChanges changes =
      compare_results(result({row("a", 100, 0, "old")}), result({row("a", 50, 0, "new")}));
  ASSERT_EQ(changes.rows.size(), 1u);
  EXPECT_EQ(changes.rows[0].verdict, Verdict::faster);
  EXPECT_EQ(changes.rows[0].old_kernel, "old");
  EXPECT_EQ(changes.rows[0].new_kernel, "new");
}

TEST(Compare, RowsOfSeveralKernelsMatchByKernel) {
  const BenchChanges changes =
      compare_results(result({row("a", 100, 0, "x"), row("a", 200, 0, "y")}),
                      result({row("a", 200, 0, "y"), row("a", 50, 0, "x"), row("a", 1, 0, "z")}));
  ASSERT_EQ(changes.rows.size(), 2u);
  EXPECT_EQ(changes.rows[0].verdict, Verdict::noise);
  EXPECT_EQ(changes.rows[1].verdict, Verdict::faster);
  EXPECT_EQ(changes.only_new.size(), 1u);
}

TEST(Compare, ListsUnmatchedRows) {
  const BenchChanges changes =
      compare_results(result({row("gone", 1, 0)}), result({row("fresh", 1, 0)}));
  EXPECT_TRUE(changes.rows.empty());
  EXPECT_EQ(changes.only_old.size(), 1u);
  EXPECT_EQ(changes.only_new.size(), 1u);
}

TEST(Compare, WarnsIfDevicesDiffer) {
  Json other = result({row("a", 1, 0)});
  other["device"] = "e";
  EXPECT_FALSE(compare_results(result({row("a", 1, 0)}), other).warning.empty());
}

TEST(Compare, RejectsTimesThatAreNotPositive) {
  for (const double us : {0.0, -1.0}) {
    EXPECT_THROW(compare_results(result({row("a", us, 0)}), result({row("a", 1, 0)})),
                 CommandError);
  }
}

}  // namespace
}  // namespace flashcore::tool
