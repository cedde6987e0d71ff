// Gradients of every CPU kernel: against the oracle, and properties that need no oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/backward.h"
#include "support/rounds.h"

namespace flashcore::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Backward : public testing::TestWithParam<const KernelInfo*> {
 protected:
  const char* id() const { return GetParam()->id; }
  /// The forward kernel with the same instruction set and type.
  const KernelInfo& forward() const {
    return *find_kernel(("fwd" + std::string(id()).substr(3)).c_str());
  }
  Inputs draw() {
    Inputs inputs = draw_call(random_, forward());
    inputs.options.partial = random_.chance(0.1);
    return inputs;
  }
  Differentiated differentiated(Inputs inputs) {
    Differentiated call = draw_gradients(random_, std::move(inputs), random_.chance(0.5));
    const Status status = differentiate(call, id());
    EXPECT_TRUE(status.ok()) << status.message();
    return call;
  }
  Random random_{20240608};
};
INSTANTIATE_TEST_SUITE_P(Kernels, Backward, testing::ValuesIn(runnable_backward_kernels()),
                         [](const auto& test) { return std::string(test.param->id); });

TEST_P(Backward, AgreesWithTheOracle) {
  for (int n = 0; n < rounds(12); ++n) {
    SCOPED_TRACE(n);
    EXPECT_EQ(gradient_verdict(differentiated(draw())), "");
  }
}

TEST_P(Backward, AnyNumberOfThreadsGivesTheSameBits) {
  for (int n = 0; n < rounds(4); ++n) {
    const Sizes sizes{.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 150, .kv_len = 210};
    Inputs inputs = draw_inputs(random_, forward(), sizes);
    add_score_options(random_, inputs);
    add_masks(random_, inputs);
    Differentiated one = draw_gradients(random_, std::move(inputs));
    ASSERT_TRUE(differentiate(one, id(), 1).ok());
    for (const int threads : {2, 3, 16}) {
      Differentiated many = one;
      ASSERT_TRUE(differentiate(many, id(), threads).ok());
      EXPECT_EQ(gradient_difference(many, one), "") << threads << " threads";
    }
  }
}

TEST_P(Backward, OtherBatchesGiveTheSameBits) {
  for (int n = 0; n < rounds(4); ++n) {
    Sizes sizes = draw_sizes(random_, forward());
    sizes.batch = 3;
    Inputs inputs = draw_inputs(random_, forward(), sizes);
    add_masks(random_, inputs);
    inputs.options.reproducibility = Reproducibility::batch_invariant;
    Differentiated together = differentiated(std::move(inputs));
    for (const std::vector<std::int64_t>& chosen :
         {std::vector<std::int64_t>{1}, {2, 0}, {0, 0, 1, 2}}) {
      Differentiated some = together;
      some.inputs = take_batch(together.inputs, chosen);
      for (Tensor Differentiated::*t :
           {&Differentiated::out, &Differentiated::lse, &Differentiated::dout,
            &Differentiated::dlse, &Differentiated::dq, &Differentiated::dk, &Differentiated::dv}) {
        if ((some.*t).given()) some.*t = take(some.*t, 0, chosen);
      }
      const Differentiated want = some;
      ASSERT_TRUE(differentiate(some, id()).ok());
      EXPECT_EQ(gradient_difference(some, want), "");
    }
  }
}

TEST_P(Backward, VarlenGivesTheBitsOfSingleSequences) {
  const DType dtype = GetParam()->dtype;
  Inputs inputs;
  inputs.q = draw_normal(random_, dtype, {81, 4, 16});
  inputs.k = draw_normal(random_, dtype, {130, 2, 16});
  inputs.v = draw_normal(random_, dtype, {130, 2, 8});
  inputs.cu_seqlens_q = ints({0, 70, 70, 79});  // rows 79 and 80 belong to no sequence
  inputs.cu_seqlens_k = ints({0, 100, 105, 127});
  inputs.options.causal = true;
  inputs.options.reproducibility = Reproducibility::batch_invariant;
  Differentiated call = draw_gradients(random_, inputs);
  ASSERT_TRUE(differentiate(call, id()).ok());
  EXPECT_EQ(gradient_verdict(call), "");
  for (const std::int64_t row : {79, 80}) EXPECT_EQ(call.dq.at({row, 3, 15}), 0.0);
  for (const std::int64_t row : {127, 129}) {
    EXPECT_EQ(call.dk.at({row, 1, 15}), 0.0);
    EXPECT_EQ(call.dv.at({row, 1, 7}), 0.0);
  }
  Differentiated last = call;
  const auto rows = [](std::int64_t begin, std::int64_t end) { return range(begin, end); };
  last.inputs.q = take(call.inputs.q, 0, rows(70, 79));
  last.inputs.k = take(call.inputs.k, 0, rows(105, 127));
  last.inputs.v = take(call.inputs.v, 0, rows(105, 127));
  last.inputs.cu_seqlens_q = ints({0, 9});
  last.inputs.cu_seqlens_k = ints({0, 22});
  for (Tensor Differentiated::*t :
       {&Differentiated::out, &Differentiated::dout, &Differentiated::dq}) {
    last.*t = take(call.*t, 0, rows(70, 79));
  }
  for (Tensor Differentiated::*t : {&Differentiated::lse, &Differentiated::dlse}) {
    last.*t = take(call.*t, 1, rows(70, 79));
  }
  for (Tensor Differentiated::*t : {&Differentiated::dk, &Differentiated::dv}) {
    last.*t = take(call.*t, 0, rows(105, 127));
  }
  const Differentiated want = last;
  ASSERT_TRUE(differentiate(last, id()).ok());
  EXPECT_EQ(gradient_difference(last, want), "");
}

TEST_P(Backward, NanInPaddingAndInRowsWithoutKeysDoesNotSpread) {
  const Sizes sizes{.batch = 2, .q_heads = 2, .kv_heads = 1, .q_len = 9, .kv_len = 70};
  Inputs inputs = draw_inputs(random_, forward(), sizes);
  inputs.used_k = ints({5, 0});  // of batch 1 no row sees a key, of batch 0 rows 4 to 8 do
  inputs.options.causal = true;
  Differentiated clean = draw_gradients(random_, inputs);
  Differentiated dirty = clean;
  for (std::int64_t d = 0; d < 16; ++d) {
    for (std::int64_t key = 0; key < 70; ++key) {
      for (std::int64_t b = 0; b < 2; ++b) {
        if (b == 0 && key < 5) continue;
        dirty.inputs.k.set({b, 0, key, d}, kNan);
        dirty.inputs.v.set({b, 0, key, d}, kNan);
      }
    }
    for (std::int64_t row = 0; row < 9; ++row) {
      dirty.inputs.q.set({1, 0, row, d}, kNan);
      dirty.dout.set({1, 1, row, d}, kNan);
      if (row < 4) dirty.dout.set({0, 1, row, d}, kNan);
    }
  }
  ASSERT_TRUE(differentiate(clean, id()).ok());
  ASSERT_TRUE(differentiate(dirty, id()).ok());
  EXPECT_EQ(gradient_difference(dirty, clean), "");
  EXPECT_EQ(clean.dk.at({0, 0, 5, 0}), 0.0);
  EXPECT_EQ(clean.dv.at({1, 0, 0, 0}), 0.0);
  EXPECT_EQ(clean.dq.at({1, 1, 8, 3}), 0.0);
  EXPECT_NE(clean.dk.at({0, 0, 4, 0}), 0.0);
}

TEST_P(Backward, LengthsOfZeroGiveZeroGradients) {
  for (const auto& [q_len, kv_len] : {std::pair{0, 7}, {7, 0}, {0, 0}}) {
    const DType dtype = GetParam()->dtype;
    Inputs inputs;
    inputs.q = draw_normal(random_, dtype, {2, 2, q_len, 8});
    inputs.k = draw_normal(random_, dtype, {2, 2, kv_len, 8});
    inputs.v = draw_normal(random_, dtype, {2, 2, kv_len, 8});
    inputs.sinks = draw_normal(random_, DType::f32, {2});
    const Differentiated call = differentiated(inputs);
    for (const Tensor* t : {&call.dq, &call.dk, &call.dv}) {
      for (const double x : t->values()) EXPECT_EQ(x, 0.0);
    }
    EXPECT_EQ(gradient_verdict(call), "");
  }
}

TEST_P(Backward, AnyLayoutGivesTheSameBits) {
  for (int n = 0; n < rounds(4); ++n) {
    Differentiated plain = differentiated(draw());
    for (int i = 1; i < verify::kMemoryLayouts; ++i) {
      const auto layout = static_cast<MemoryLayout>(i);
      Differentiated other = plain;
      for (Tensor Inputs::*t : {&Inputs::q, &Inputs::k, &Inputs::v}) {
        other.inputs.*t = rearranged(plain.inputs.*t, layout);
      }
      for (Tensor Differentiated::*t :
           {&Differentiated::out, &Differentiated::dout, &Differentiated::dq, &Differentiated::dk,
            &Differentiated::dv}) {
        other.*t = rearranged(plain.*t, layout);
      }
      ASSERT_TRUE(differentiate(other, id()).ok());
      EXPECT_EQ(gradient_difference(other, plain), "") << "layout " << i;
    }
  }
}

TEST_P(Backward, WantedGradientsDoNotDependOnOthers) {
  Inputs inputs = draw();
  const Differentiated all = differentiated(std::move(inputs));
  for (Tensor Differentiated::*wanted :
       {&Differentiated::dq, &Differentiated::dk, &Differentiated::dv}) {
    Differentiated one = all;
    one.dq = one.dk = one.dv = one.dbias = one.dsinks = {};
    one.*wanted = Tensor((all.*wanted).dtype(), (all.*wanted).shape());
    ASSERT_TRUE(differentiate(one, id()).ok());
    FLASHCORE_EXPECT_SAME_BITS(one.*wanted, all.*wanted);
  }
}

// The LSE of such rows does not tell how many keys it sums.
TEST_P(Backward, ABiasOfTheLowestNumberGivesEqualWeights) {
  Inputs inputs = draw_inputs(random_, forward(), {.q_len = 3, .kv_len = 4});
  inputs.bias = Tensor(DType::f32, {1, 1, 1, 4});
  inputs.bias.fill(-std::numeric_limits<float>::max());
  const Differentiated call = differentiated(std::move(inputs));
  for (std::int64_t c = 0; c < 16; ++c) {
    double want = 0;
    for (std::int64_t i = 0; i < 3; ++i) want += call.dout.at({0, 0, i, c}) / 4;
    for (std::int64_t key = 0; key < 4; ++key) {
      EXPECT_NEAR(call.dv.at({0, 0, key, c}), want, 0.01 * (1 + std::fabs(want)));
    }
  }
}

}  // namespace
}  // namespace flashcore::test
