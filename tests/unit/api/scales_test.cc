// Valid and invalid combinations of the types of q, k, v and out, and of their scales.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "flashcore/attention.h"

namespace flashcore::test {
namespace {

/// A call with shapes and addresses only. It does not run.
struct Call {
  alignas(256) char memory[1 << 16] = {};
  Tensors tensors;
  Options options;

  Call(DType q, DType kv, DType out) {
    int next = 0;
    const auto place = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
      return view(memory + (next++ << 13), dtype, shape);
    };
    tensors.q = place(q, {2, 4, 5, 8});
    tensors.k = place(kv, {2, 2, 7, 8});
    tensors.v = place(kv, {2, 2, 7, 8});
    tensors.out = place(out, {2, 4, 5, 8});
    tensors.q_scale = place(DType::f32, {2, 4});
    tensors.k_scale = place(DType::f32, {1});
    tensors.v_scale = place(DType::f32, {2, 2, 3});
    options.kv_scale_block = 3;
  }
  Result<Problem> problem() const { return make_problem(tensors, options); }
};

void expect_refused(const Call& call, const char* word) {
  const Result<Problem> problem = call.problem();
  ASSERT_FALSE(problem.ok()) << word;
  EXPECT_EQ(problem.status().code(), StatusCode::invalid_argument);
  EXPECT_NE(problem.status().message().find(word), std::string::npos)
      << problem.status().message() << " has no \"" << word << "\"";
}

TEST(Scales, ProblemsWithEightBitQHaveTheTypeOfOut) {
  for (const DType out : {DType::f16, DType::bf16, DType::f32}) {
    const Result<Problem> problem = Call(DType::e4m3, DType::int8, out).problem();
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    EXPECT_EQ(problem->dtype, out == DType::bf16 ? DType::bf16 : DType::f16);
    EXPECT_EQ(problem->q.dtype, DType::e4m3);
    EXPECT_EQ(problem->v_scale.row, 1);
    EXPECT_EQ(problem->k_scale.batch, 0);
  }
}

TEST(Scales, OneHugeBlockNeedsAScale) {
  Call call(DType::e4m3, DType::int8, DType::f16);
  call.options.kv_scale_block = INT64_MAX;
  EXPECT_TRUE(call.problem().ok());
  call.tensors.v_scale.shape[2] = 0;
  expect_refused(call, "v_scale: has 0 blocks; 7 rows");
}

TEST(Scales, WideQAndEightBitKvAreValid) {
  for (const DType q : {DType::f32, DType::f16, DType::bf16}) {
    Call call(q, DType::u8, q);
    call.tensors.q_scale = {};
    const Result<Problem> problem = call.problem();
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    EXPECT_EQ(problem->dtype, q);
  }
}

TEST(Scales, KAndVMayHaveDifferentTypes) {
  Call call(DType::f16, DType::int8, DType::f16);
  call.tensors.q_scale = {};
  call.tensors.v.dtype = DType::e4m3;
  EXPECT_TRUE(call.problem().ok());
}

TEST(Scales, RejectInvalidCombinationsOfTypes) {
  Call wide_keys(DType::e4m3, DType::f16, DType::f16);
  expect_refused(wide_keys, "k: dtype is f16, q is e4m3");
  Call f64(DType::f64, DType::e4m3, DType::f64);
  expect_refused(f64, "wanted f64, as q has");
  Call out(DType::int8, DType::int8, DType::int8);
  expect_refused(out, "out: dtype is int8; wanted f16, bf16 or f32");
  Call other(DType::f16, DType::bf16, DType::f16);
  expect_refused(other, "k: dtype is bf16; wanted f16, as q has, or an 8-bit type");
}

TEST(Scales, RejectBadShapesAndTypes) {
  const auto call = [] { return Call(DType::e4m3, DType::e4m3, DType::f16); };
  const auto reject = [&](auto corrupt, const char* word) {
    Call bad = call();
    corrupt(bad);
    expect_refused(bad, word);
  };
  ASSERT_TRUE(call().problem().ok());
  reject([](Call& c) { c.tensors.q_scale.shape[1] = 2; }, "q_scale: heads is 2");
  reject([](Call& c) { c.tensors.q_scale.shape[0] = 1; }, "q_scale: batch is 1");
  reject([](Call& c) { c.tensors.k_scale.shape[0] = 2; }, "k_scale: rank is 1 and it has more");
  reject([](Call& c) { c.tensors.k_scale.dtype = DType::f16; }, "k_scale: dtype is f16");
  reject([](Call& c) { c.tensors.q_scale.rank = 4; }, "q_scale: rank is 4");
  reject([](Call& c) { c.tensors.v_scale.shape[2] = 2; }, "v_scale: has 2 blocks");
  reject([](Call& c) { c.options.kv_scale_block = 0; }, "kv_scale_block is 0");
  reject([](Call& c) { c.options.q_scale_block = -1; }, "q_scale_block is -1");
  reject([](Call& c) { c.tensors.q_scale.strides[1] = -1; }, "q_scale: stride 1 is -1");
  reject([](Call& c) { c.tensors.v_scale.data = nullptr; }, "v_scale: the pointer is null");
  reject([](Call& c) { c.tensors.v_scale.data = c.tensors.out.data; }, "shares memory");
  Call wide(DType::f16, DType::f16, DType::f16);
  expect_refused(wide, "q_scale: given, but q is f16");
}

}  // namespace
}  // namespace flashcore::test
