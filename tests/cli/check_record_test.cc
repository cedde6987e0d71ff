// A record keeps everything that another process needs to count an outcome.
#include "check/check_record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flashcore::tool {
namespace {

CheckRecord round_trip(const CheckRecord& record) {
  return check_record_of(Json::parse(to_json(record).dump()));
}

CheckRecord compared(double ratio, double error) {
  CheckRecord record;
  record.outcome.plan.kernel = &kernels()[1];
  record.outcome.plan.splits = 3;
  record.outcome.plan.tile_q = 64;
  record.outcome.plan.tile_k = 128;
  record.outcome.comparison.ok = true;
  record.outcome.comparison.worst_ratio = ratio;
  record.outcome.comparison.max_error = error;
  return record;
}

TEST(CheckRecord, KeepsCoverageFacts) {
  CheckRecord before = compared(0.1, 1.0 / 3);
  before.outcome.facts.three_tiles = before.outcome.facts.idle_warpgroup = true;
  const CheckRecord record = round_trip(before);
  EXPECT_TRUE(record.outcome.facts.three_tiles);
  EXPECT_FALSE(record.outcome.facts.keyless_between);
  EXPECT_FALSE(record.outcome.facts.three_keyless);
  EXPECT_TRUE(record.outcome.facts.idle_warpgroup);
  EXPECT_TRUE(record.passed());
  EXPECT_EQ(record.outcome.plan.kernel, &kernels()[1]);
  EXPECT_EQ(record.outcome.plan.splits, 3);
  EXPECT_EQ(record.outcome.plan.tile_q, 64);
  EXPECT_EQ(record.outcome.plan.tile_k, 128);
  EXPECT_EQ(record.outcome.comparison.worst_ratio, 0.1);
  EXPECT_EQ(record.outcome.comparison.max_error, 1.0 / 3);
}

TEST(CheckRecord, KeepsNonFiniteNumbers) {
  const double infinity = std::numeric_limits<double>::infinity();
  CheckRecord record = compared(infinity, std::nan(""));
  record.outcome.comparison.ok = false;
  record.outcome.comparison.reason = "errors exceed their bounds";
  record.outcome.comparison.non_finite = 7;
  record.outcome.comparison.unwritten = 2;
  record = round_trip(record);
  EXPECT_FALSE(record.passed());
  EXPECT_EQ(record.failure(), "errors exceed their bounds");
  EXPECT_EQ(record.outcome.comparison.worst_ratio, infinity);
  EXPECT_TRUE(std::isnan(record.outcome.comparison.max_error));
  EXPECT_EQ(record.outcome.comparison.non_finite, 7);
  EXPECT_EQ(record.outcome.comparison.unwritten, 2);
}

TEST(CheckRecord, KeepsStrayWritesAndErrors) {
  CheckRecord record = compared(0.1, 0.1);
  record.outcome.stray_writes = true;
  EXPECT_EQ(round_trip(record).failure(), record.failure());
  record.outcome.status = {StatusCode::out_of_memory, "not enough"};
  const CheckRecord same = round_trip(record);
  EXPECT_EQ(same.outcome.status.code(), StatusCode::out_of_memory);
  EXPECT_EQ(same.failure(), record.failure());
}

TEST(CheckRecord, HungProblemHasNoComparison) {
  CheckRecord record;
  record.hung = "it did not end within 20 s";
  record = round_trip(record);
  EXPECT_FALSE(record.passed());
  EXPECT_FALSE(record.outcome.status.ok());
  EXPECT_EQ(record.failure(), "it did not end within 20 s");
}

TEST(CheckRecord, KeysRoundTrip) {
  EXPECT_EQ(index_in("random", key_of("random", 17)), 17u);
  EXPECT_EQ(index_in("tuning", key_of("random", 17)), std::nullopt);
  EXPECT_EQ(index_in("a/b", key_of("a/b", 3)), 3u);
}

}  // namespace
}  // namespace flashcore::tool
