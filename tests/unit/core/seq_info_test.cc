// core/seq_info.h: lengths and positions, and the clamping of bad values.
#include "core/seq_info.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/call.h"
#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

AttentionParams dense_params() {
  AttentionParams p{};
  p.batch = 2;
  p.q_len = 4;
  p.kv_len = 10;
  p.window_left = p.window_right = -1;
  return p;
}

AttentionParams varlen_params(const std::vector<std::int32_t>& cu_q,
                              const std::vector<std::int32_t>& cu_k) {
  AttentionParams p = dense_params();
  p.total_q = 12;
  p.total_k = 30;
  p.q_len = 6;
  p.kv_len = 20;
  p.cu_seqlens_q = cu_q.data();
  p.cu_seqlens_k = cu_k.data();
  return p;
}

void expect_error(const SeqInfo& s, ErrorCode code, std::int32_t batch, std::int64_t index,
                  std::int64_t value) {
  EXPECT_EQ(s.error.code, static_cast<std::int32_t>(code));
  EXPECT_EQ(s.error.batch, batch);
  EXPECT_EQ(s.error.index, index);
  EXPECT_EQ(s.error.value, value);
}

TEST(SeqInfo, DenseLengthsAlignBottomRight) {
  const SeqInfo s = seq_info_of(dense_params(), 1);
  EXPECT_EQ(s.q_len, 4);
  EXPECT_EQ(s.kv_len, 10);
  EXPECT_EQ(s.q_row, 0);
  EXPECT_EQ(s.k_row, 0);
  EXPECT_EQ(s.mask.diagonal, 6);
  EXPECT_EQ(s.mask.kv_len, 10);
  EXPECT_EQ(s.error.code, 0);
}

TEST(SeqInfo, VarlenLengthsComeFromCuSeqlens) {
  const std::vector<std::int32_t> cu_q{0, 5, 11}, cu_k{0, 20, 29};
  const SeqInfo s = seq_info_of(varlen_params(cu_q, cu_k), 1);
  EXPECT_EQ(s.q_row, 5);
  EXPECT_EQ(s.q_len, 6);
  EXPECT_EQ(s.k_row, 20);
  EXPECT_EQ(s.kv_len, 9);
  EXPECT_EQ(s.mask.diagonal, 3);
  EXPECT_EQ(s.error.code, 0);
}

TEST(SeqInfo, UsedLengthsAndStartsFollowTheirStrides) {
  AttentionParams p = dense_params();
  const std::int32_t used[] = {7, -1, 3}, q_start[] = {100, -1, -2, -1}, k_start[] = {1, 40};
  p.used_k = used, p.used_k_stride = 2;
  p.q_start = q_start, p.q_start_stride = 2;
  p.k_start = k_start, p.k_start_stride = 1;
  const SeqInfo s = seq_info_of(p, 1);
  EXPECT_EQ(s.kv_len, 3);
  EXPECT_EQ(s.mask.kv_len, 3);
  EXPECT_EQ(s.mask.diagonal, -2 - 40);
  EXPECT_EQ(s.error.code, 0);
}

TEST(SeqInfo, BadCuSeqlensQIsClampedAndNamed) {
  const std::vector<std::int32_t> good{0, 20, 29};
  struct Row {
    std::vector<std::int32_t> cu;
    std::int32_t q_row, q_len;
    std::int64_t index, value;
  };
  const Row rows[] = {
      {{0, 6, 5}, 6, 0, 2, 5},      // decreasing
      {{0, -3, 5}, 0, 5, 1, -3},    // negative
      {{0, 7, 13}, 7, 5, 2, 13},    // past total_q
      {{0, 13, 13}, 12, 0, 1, 13},  // begins past total_q
      {{0, 4, 11}, 4, 6, 2, 11},    // longer than max_q_len
  };
  for (const Row& row : rows) {
    const SeqInfo s = seq_info_of(varlen_params(row.cu, good), 1);
    EXPECT_EQ(s.q_row, row.q_row);
    EXPECT_EQ(s.q_len, row.q_len);
    expect_error(s, ErrorCode::cu_seqlens_q_invalid, 1, row.index, row.value);
  }
}

TEST(SeqInfo, BadCuSeqlensKIsClampedAndNamed) {
  const std::vector<std::int32_t> good{0, 5, 11};
  const std::vector<std::int32_t> decreasing{0, 10, 4}, past{0, 20, 31}, longer{0, 1, 22};
  SeqInfo s = seq_info_of(varlen_params(good, decreasing), 1);
  EXPECT_EQ(s.kv_len, 0);
  expect_error(s, ErrorCode::cu_seqlens_k_invalid, 1, 2, 4);
  s = seq_info_of(varlen_params(good, past), 1);
  EXPECT_EQ(s.kv_len, 10);
  expect_error(s, ErrorCode::cu_seqlens_k_invalid, 1, 2, 31);
  s = seq_info_of(varlen_params(good, longer), 1);
  EXPECT_EQ(s.kv_len, 20);
  expect_error(s, ErrorCode::cu_seqlens_k_invalid, 1, 2, 22);
}

TEST(SeqInfo, BadUsedLengthsAndStartsAreClampedAndNamed) {
  AttentionParams p = dense_params();
  const std::int32_t used[] = {11, -1};
  p.used_k = used, p.used_k_stride = 1;
  EXPECT_EQ(seq_info_of(p, 0).kv_len, 10);
  expect_error(seq_info_of(p, 0), ErrorCode::used_k_out_of_range, 0, 0, 11);
  EXPECT_EQ(seq_info_of(p, 1).kv_len, 0);
  expect_error(seq_info_of(p, 1), ErrorCode::used_k_out_of_range, 1, 1, -1);

  p = dense_params();
  const std::int32_t starts[] = {kMaxStart + 1, -kMaxStart - 1};
  p.q_start = starts, p.q_start_stride = 1;
  expect_error(seq_info_of(p, 0), ErrorCode::q_start_out_of_range, 0, 0, kMaxStart + 1);
  EXPECT_EQ(seq_info_of(p, 0).mask.diagonal, kMaxStart);
  expect_error(seq_info_of(p, 1), ErrorCode::q_start_out_of_range, 1, 1, -kMaxStart - 1);

  p = dense_params();
  p.k_start = starts, p.k_start_stride = 1;
  expect_error(seq_info_of(p, 0), ErrorCode::k_start_out_of_range, 0, 0, kMaxStart + 1);
  EXPECT_EQ(seq_info_of(p, 1).mask.diagonal, 6 + kMaxStart);
}

TEST(SeqInfo, ReportsTheFirstError) {
  const std::vector<std::int32_t> cu_q{0, 5, 3}, cu_k{0, 10, 4};
  expect_error(seq_info_of(varlen_params(cu_q, cu_k), 1), ErrorCode::cu_seqlens_q_invalid, 1, 2, 3);
}

TEST(SeqInfo, ArbitraryIntegersStayWithinCapacity) {
  verify::Random random(7);
  const auto any = [&]() -> std::int32_t {
    static constexpr std::int32_t kSpecial[] = {INT32_MIN, INT32_MAX, -1, 0, 1, 12, 13, 30, 31};
    if (random.chance(0.5)) return random.pick(kSpecial);
    return static_cast<std::int32_t>(random.bits());
  };
  int errors = 0;
  for (int n = 0; n < test::rounds(200000); ++n) {
    const std::vector<std::int32_t> cu_q{any(), any(), any()}, cu_k{any(), any(), any()};
    const std::int32_t used[] = {any(), any()}, q_start[] = {any(), any()},
                       k_start[] = {any(), any()};
    AttentionParams p = varlen_params(cu_q, cu_k);
    p.used_k = used, p.used_k_stride = 1;
    p.q_start = q_start, p.q_start_stride = 1;
    p.k_start = k_start, p.k_start_stride = 1;
    for (std::int32_t b = 0; b < 2; ++b) {
      const SeqInfo s = seq_info_of(p, b);
      ASSERT_GE(s.q_row, 0);
      ASSERT_GE(s.q_len, 0);
      ASSERT_LE(s.q_len, p.q_len);
      ASSERT_LE(s.q_row + s.q_len, p.total_q);
      ASSERT_GE(s.k_row, 0);
      ASSERT_GE(s.kv_len, 0);
      ASSERT_LE(s.kv_len, p.kv_len);
      ASSERT_LE(s.k_row + s.kv_len, p.total_k);
      ASSERT_EQ(s.mask.kv_len, s.kv_len);
      ASSERT_LE(std::abs(s.mask.diagonal), 2 * static_cast<std::int64_t>(kMaxStart));
      errors += s.error.code != 0 ? 1 : 0;
    }
  }
  EXPECT_GT(errors, 0);
}

TEST(SeqInfo, DroppedKeysMoveTheFirstRow) {
  SeqInfo s{};
  s.q_len = 4, s.kv_len = 10, s.k_row = 100;
  s.mask = {6, 2, 0, 10, {}};
  drop_first_keys(s, 3);
  EXPECT_EQ(s.k_row, 103);
  EXPECT_EQ(s.kv_len, 7);
  EXPECT_EQ(s.mask.kv_len, 7);
  EXPECT_EQ(s.mask.diagonal, 3);
}

TEST(SeqInfo, QueryHeadsShareKvHeadsInGroups) {
  AttentionParams p{};
  p.q_heads = 6;
  p.kv_heads = 2;
  p.group = 3;
  const std::int32_t wanted[] = {0, 0, 0, 1, 1, 1};
  for (std::int32_t h = 0; h < 6; ++h) EXPECT_EQ(kv_head_of(p, h), wanted[h]);
}

}  // namespace
}  // namespace flashcore::core
