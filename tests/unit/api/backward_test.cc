// Validation, planning and the C ABI of gradients.
#include "flashcore/backward.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "support/backward.h"
#include "support/to_c.h"

namespace flashcore::test {
namespace {

class BackwardApi : public testing::Test {
 protected:
  BackwardApi() {
    Random random(6);
    Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                                {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 5, .kv_len = 7});
    inputs.sinks = draw_normal(random, DType::f32, {4});
    inputs.bias = draw_normal(random, DType::f32, {1, 4, 5, 7});
    call_ = draw_gradients(random, std::move(inputs));
    tensors_ = call_.tensors();
    gradients_ = call_.gradients();
  }
  Status status() const {
    return make_backward_problem(tensors_, gradients_, call_.inputs.options).status();
  }
  void expect_refused(StatusCode code, const char* words) const {
    EXPECT_EQ(status().code(), code) << status().message();
    EXPECT_NE(status().message().find(words), std::string::npos) << status().message();
  }
  BackwardPlan plan() const {
    return *make_backward_plan(*make_backward_problem(tensors_, gradients_, call_.inputs.options),
                               *device_info({}));
  }

  Differentiated call_;
  Tensors tensors_;
  Gradients gradients_;
};

TEST_F(BackwardApi, AcceptsTheCall) { EXPECT_TRUE(status().ok()) << status().message(); }

TEST_F(BackwardApi, RefusesCallsWithoutGradientsInWords) {
  tensors_.lse = {};
  expect_refused(StatusCode::invalid_argument, "lse: not given; gradients need the forward's LSE");
  tensors_ = call_.tensors();
  tensors_.k.dtype = DType::e4m3;
  expect_refused(StatusCode::unsupported, "k: dtype is e4m3; gradients are computed for f32");
  tensors_ = call_.tensors();
  const Tensor table = ints({0, 1});
  tensors_.block_table = table.view();
  expect_refused(StatusCode::unsupported, "block_table: gradients through pages");
}

TEST_F(BackwardApi, NamesTheWrongArgument) {
  const auto with = [&](TensorView Gradients::*one, auto change, const char* words) {
    gradients_ = call_.gradients();
    change(gradients_.*one);
    expect_refused(StatusCode::invalid_argument, words);
  };
  with(
      &Gradients::dout, [](TensorView& t) { t = {}; }, "dout: not given");
  with(
      &Gradients::dout, [](TensorView& t) { t.shape[2] = 4; }, "dout: extent 2 is 4, out has 5");
  with(
      &Gradients::dlse, [](TensorView& t) { t.rank = 2; }, "dlse: rank is 2, lse has 3");
  with(
      &Gradients::dq, [](TensorView& t) { t.dtype = DType::bf16; }, "dq: dtype is bf16");
  with(
      &Gradients::dk, [](TensorView& t) { t.strides[3] = 0; }, "dk: its strides make elements");
  with(
      &Gradients::dv, [](TensorView& t) { t.data = nullptr; }, "dv: the pointer is null");
  with(
      &Gradients::dk, [&](TensorView& t) { t.data = tensors_.k.data; },
      "dk: shares memory with the input k");
  with(
      &Gradients::dk, [&](TensorView& t) { t.data = gradients_.dv.data; }, "shares memory with d");
  with(
      &Gradients::dbias, [](TensorView& t) { t.shape[0] = 2; }, "dbias: extent 0 is 2");
  with(
      &Gradients::dsinks, [](TensorView& t) { t.dtype = DType::f64; }, "dsinks: dtype is f64");
  gradients_ = call_.gradients();
  tensors_.bias = {};
  expect_refused(StatusCode::invalid_argument, "dbias: given, but the call has no bias");
  tensors_ = call_.tensors();
  tensors_.sinks = {};
  expect_refused(StatusCode::invalid_argument, "dsinks: given, but the call has no sinks");
}

TEST_F(BackwardApi, RunChecksThePlanAndTheWorkspace) {
  const BackwardPlan made = plan();
  const WorkspaceMemory memory(workspace_bytes(made));
  EXPECT_TRUE(run_backward(made, tensors_, gradients_, memory.get()).ok());
  EXPECT_EQ(run_backward({}, tensors_, gradients_, memory.get()).code(),
            StatusCode::invalid_argument);
  Workspace small = memory.get();
  small.bytes -= 1;
  EXPECT_EQ(run_backward(made, tensors_, gradients_, small).code(), StatusCode::invalid_argument);
  Gradients fewer = gradients_;
  fewer.dv = {};
  const Status other = run_backward(made, tensors_, fewer, memory.get());
  EXPECT_NE(other.message().find("not those of the plan"), std::string::npos) << other.message();
}

TEST_F(BackwardApi, WorkspaceIsLinearInTheLength) {
  const auto bytes = [](std::int64_t length) {
    BackwardProblem problem;
    problem.forward = *dense_problem(DType::f32, 1, 8, 8, length, length, 64, 64);
    DeviceInfo device = *device_info({});
    device.threads = 1;
    return static_cast<double>(make_backward_plan(problem, device)->workspace_bytes);
  };
  EXPECT_EQ(bytes(1 << 17) - bytes(1 << 16), 2 * (bytes(1 << 16) - bytes(1 << 15)));
  EXPECT_LT(bytes(1 << 17), 8.0 * (1 << 17) * 16 + (1 << 20));
}

TEST_F(BackwardApi, ForwardAndBackwardKernelsAreNotMixedUp) {
  Options options = call_.inputs.options;
  options.kernel = "fwd_generic_f32";
  const BackwardProblem problem = *make_backward_problem(tensors_, gradients_, options);
  const Status refused = make_backward_plan(problem, *device_info({})).status();
  EXPECT_NE(refused.message().find("computes results, for run()"), std::string::npos)
      << refused.message();
  options.kernel = "bwd_generic_f32";
  const Status forward = make_plan(*make_problem(tensors_, options), *device_info({})).status();
  EXPECT_NE(forward.message().find("computes gradients, for run_backward()"), std::string::npos)
      << forward.message();
}

TEST_F(BackwardApi, PlansForGpus) {
  const DeviceInfo h200 = *named_device("h200");
  for (const std::int64_t dim : {16, 128, 200, 576}) {
    BackwardProblem problem;
    problem.forward = *dense_problem(DType::f32, 2, 8, 4, 64, 96, dim, dim, {}, h200.device);
    problem.dq = problem.forward.q;
    const Result<BackwardPlan> plan = make_backward_plan(problem, h200);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_STREQ(plan->kernel->family_name(), "simt");
    EXPECT_GE(plan->kernel->head_dim, dim);
    // Three statistics per row, each aligned to 256 bytes.
    EXPECT_EQ(plan->workspace_bytes, kWorkspaceHeaderBytes + 3 * (2 * 8 * 64 * 4));
    EXPECT_NE(explain(*plan).find("dk and dv: "), std::string::npos) << explain(*plan);
  }
  BackwardProblem wide;
  wide.forward = *dense_problem(DType::f32, 1, 8, 8, 64, 64, 64, 64, {}, h200.device);
  wide.forward.dtype = DType::f64;
  const Status refused = make_backward_plan(wide, h200).status();
  EXPECT_EQ(refused.code(), StatusCode::unsupported);
  EXPECT_NE(refused.message().find("no kernel computes gradients of f64"), std::string::npos)
      << refused.message();
}

TEST_F(BackwardApi, TensorCoresComputeGradientsOf16Bits) {
  const DeviceInfo h200 = *named_device("h200");
  BackwardProblem problem;
  problem.forward = *dense_problem(DType::f16, 2, 8, 4, 64, 96, 96, 80, {}, h200.device);
  problem.dout = problem.forward.out;
  problem.dq = problem.forward.q;
  problem.dk = problem.forward.k;
  const Result<BackwardPlan> usual = make_backward_plan(problem, h200);
  ASSERT_TRUE(usual.ok()) << usual.status().message();
  EXPECT_STREQ(usual->kernel->id, "bwd_sm90_f16_d96");
  const std::string text = explain(*usual);
  for (const char* line : {"bwd_sm80_f16_d96         is slower by estimate than another family",
                           "bwd_sm80_f16_d64         takes dims up to 64/64, got 96/80"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << " in\n" << text;
  }
  const auto kernel_for = [&](std::int64_t head_dim, std::int64_t v_dim) {
    BackwardProblem wide;
    wide.forward = *dense_problem(DType::f16, 2, 8, 4, 64, 96, head_dim, v_dim, {}, h200.device);
    wide.dout = wide.forward.out;
    wide.dq = wide.forward.q;
    wide.dk = wide.forward.k;
    const Result<BackwardPlan> plan = make_backward_plan(wide, h200);
    return plan.ok() ? plan->kernel->id : "none";
  };
  EXPECT_STREQ(kernel_for(192, 128), "bwd_sm90_f16_d192_v128");
  EXPECT_STREQ(kernel_for(136, 64), "bwd_sm90_f16_d192_v128");
  EXPECT_STREQ(kernel_for(192, 192), "bwd_sm90_f16_d256");
  EXPECT_STREQ(kernel_for(64, 256), "bwd_sm90_f16_d256");
  problem.forward.options.kernel = "bwd_sm80_f16_d128";
  const Result<BackwardPlan> named = make_backward_plan(problem, h200);
  ASSERT_TRUE(named.ok()) << named.status().message();
  EXPECT_STREQ(named->kernel->id, "bwd_sm80_f16_d128");
  EXPECT_EQ(named->workspace_bytes,
            named->dout_largest_offset + 256);  // 3 * 2 * 4 numbers, aligned
  problem.dout.dtype = DType::f32;
  const Status refused = make_backward_plan(problem, h200).status();
  EXPECT_NE(refused.message().find("takes dout in q's dtype only"), std::string::npos)
      << refused.message();
  problem.dout.dtype = DType::f16;
  problem.forward.options.softcap = 300;
  EXPECT_NE(make_backward_plan(problem, h200).status().message().find("softcap of at most 256"),
            std::string::npos);
  problem.forward.options.kernel = nullptr;
  const Result<BackwardPlan> exact = make_backward_plan(problem, h200);
  ASSERT_TRUE(exact.ok()) << exact.status().message();
  EXPECT_STREQ(exact->kernel->family_name(), "simt");
}

TEST_F(BackwardApi, HopperKernelsWriteAlignedGradientsInTheirTypeOrF32) {
  const DeviceInfo h200 = *named_device("h200");
  BackwardProblem problem;
  problem.forward = *dense_problem(DType::bf16, 2, 8, 4, 64, 96, 96, 80, {}, h200.device);
  problem.dout = problem.forward.out;
  problem.dq = problem.forward.q;
  problem.dk = problem.forward.k;
  problem.forward.options.kernel = "bwd_sm90_bf16_d96";
  const Result<BackwardPlan> named = make_backward_plan(problem, h200);
  ASSERT_TRUE(named.ok()) << named.status().message();
  EXPECT_STREQ(named->kernel->id, "bwd_sm90_bf16_d96");
  const auto expect_refused = [&](const BackwardProblem& bad, const char* reason) {
    const Status refused = make_backward_plan(bad, h200).status();
    EXPECT_NE(refused.message().find(reason), std::string::npos) << refused.message();
  };
  BackwardProblem bad = problem;
  bad.dq.dtype = DType::f16;
  expect_refused(bad, "writes dq, dk and dv in q's dtype or f32");
  bad = problem;
  bad.dq.alignment_bytes = 4;
  expect_refused(bad, "8-byte aligned rows");
  bad = problem;
  bad.dout.alignment_bytes = 8;
  expect_refused(bad, "needs a dout with contiguous, 16-byte aligned rows");
  bad = problem;
  bad.forward.bias = bad.forward.q;
  expect_refused(bad, "bias");
}

TEST_F(BackwardApi, FusedKernelsTakeDqDkAndDvTogether) {
  const DeviceInfo h200 = *named_device("h200");
  BackwardProblem problem;
  problem.forward = *dense_problem(DType::bf16, 2, 8, 4, 100, 96, 80, 80, {}, h200.device);
  problem.dout = problem.forward.out;
  problem.dq = problem.forward.q;
  problem.dk = problem.forward.k;
  problem.dv = problem.forward.v;
  const auto expect_word = [](const std::string& text, const char* word) {
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
  };
  problem.forward.options.kernel = "bwd_sm90_bf16_d128_fused";
  const Result<BackwardPlan> named = make_backward_plan(problem, h200);
  ASSERT_TRUE(named.ok()) << named.status().message();
  EXPECT_STREQ(named->kernel->id, "bwd_sm90_bf16_d128_fused");
  // Sums of 2 * 8 heads, two tiles of 64 rows each.
  EXPECT_EQ(named->dq_turns_offset - named->dq_partials_offset, 2u * 8 * 2 * 64 * 128 * 4);
  expect_word(explain(*named), "sums of dq 1048576");
  BackwardProblem bad = problem;
  bad.dv = {};
  expect_word(make_backward_plan(bad, h200).status().message(), "dq, dk and dv together only");
  bad = problem;
  bad.forward.options.softcap = 50;
  expect_word(make_backward_plan(bad, h200).status().message(), "softcap");
  problem.forward.options.kernel = nullptr;
  const Result<BackwardPlan> usual = make_backward_plan(problem, h200);
  ASSERT_TRUE(usual.ok()) << usual.status().message();
  expect_word(explain(*usual), "bwd_sm90_bf16_d128_fused is slower for this number of rows");
}

TEST_F(BackwardApi, FusedKernelsComputeLongCalls) {
  const DeviceInfo h200 = *named_device("h200");
  const auto chosen = [&](std::int64_t length, std::int64_t kv_heads, std::int64_t head_dim,
                          const Options& options) -> std::string {
    BackwardProblem problem;
    problem.forward = *dense_problem(DType::bf16, 4, 16, kv_heads, length, length, head_dim,
                                     head_dim, options, h200.device);
    problem.dout = problem.forward.out;
    problem.dq = problem.forward.q;
    problem.dk = problem.forward.k;
    problem.dv = problem.forward.v;
    const Result<BackwardPlan> plan = make_backward_plan(problem, h200);
    return plan.ok() ? plan->kernel->id : plan.status().message();
  };
  const Options causal{.causal = true};
  EXPECT_EQ(chosen(1024, 16, 128, {}), "bwd_sm90_bf16_d128_fused");
  EXPECT_EQ(chosen(1023, 16, 128, {}), "bwd_sm90_bf16_d128");
  EXPECT_EQ(chosen(1024, 8, 128, {}), "bwd_sm90_bf16_d128");  // too few work tiles
  EXPECT_EQ(chosen(2048, 8, 128, {}), "bwd_sm90_bf16_d128_fused");
  EXPECT_EQ(chosen(4096, 16, 96, {}), "bwd_sm90_bf16_d96");
  EXPECT_EQ(chosen(2047, 16, 128, causal), "bwd_sm90_bf16_d128");
  EXPECT_EQ(chosen(2048, 16, 128, causal), "bwd_sm90_bf16_d128_fused");
  // Its bits are not those of shorter calls.
  EXPECT_EQ(chosen(4096, 16, 128, {.reproducibility = Reproducibility::batch_invariant}),
            "bwd_sm90_bf16_d128");
}

TEST_F(BackwardApi, ExplainNamesKernelWorkspaceAndReasons) {
  const std::string text = explain(plan());
  for (const char* word : {"gradients  dq, dk, dv, dbias, dsinks; with a gradient of lse",
                           "kernel     bwd_", "workspace  ", "not used", "GFLOP"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
  }
  EXPECT_EQ(text.find("fwd_"), std::string::npos);
}

TEST_F(BackwardApi, CostCountsFiveProducts) {
  const BackwardProblem problem =
      *make_backward_problem(tensors_, gradients_, call_.inputs.options);
  EXPECT_EQ(cost(problem).flops, 2.0 * (3 * 16 + 2 * 16) * 2 * 4 * 5 * 7);
}

TEST_F(BackwardApi, ACancelledCallWritesNothing) {
  const BackwardPlan made = plan();
  const WorkspaceMemory memory(workspace_bytes(made));
  const Differentiated before = call_;
  const std::int32_t cancel = 1;
  EXPECT_EQ(run_backward(made, tensors_, gradients_, memory.get(), nullptr, &cancel).code(),
            StatusCode::cancelled);
  EXPECT_EQ(gradient_difference(call_, before), "");
}

TEST_F(BackwardApi, CGivesTheResultOfCpp) {
  Differentiated want = call_;
  ASSERT_TRUE(differentiate(want).ok());
  CCall forward(tensors_, call_.inputs.options);
  CTensor dout(gradients_.dout), dlse(gradients_.dlse), dq(gradients_.dq), dk(gradients_.dk),
      dv(gradients_.dv), dbias(gradients_.dbias), dsinks(gradients_.dsinks);
  flashcore_backward_params p{
      sizeof p,   &forward.params, &dout.tensor,  &dlse.tensor,   &dq.tensor,
      &dk.tensor, &dv.tensor,      &dbias.tensor, &dsinks.tensor, 0};
  flashcore_error error{};
  flashcore_plan_info info{};
  info.struct_size = sizeof info;
  ASSERT_EQ(flashcore_backward_plan(&p, &info, &error), FLASHCORE_OK) << error.message;
  EXPECT_EQ(std::string(info.kernel).substr(0, 4), "bwd_");
  const WorkspaceMemory memory(info.workspace_bytes);
  forward.params.workspace = memory.get().data;
  forward.params.workspace_bytes = memory.get().bytes;
  ASSERT_EQ(flashcore_attention_backward(&p, &error), FLASHCORE_OK) << error.message;
  EXPECT_EQ(gradient_difference(call_, want), "");
  std::size_t needed = 0;
  ASSERT_EQ(flashcore_backward_explain(&p, nullptr, 0, &needed, &error), FLASHCORE_OK);
  EXPECT_GT(needed, 100u);
  p.global_lse = 2;
  EXPECT_EQ(flashcore_attention_backward(&p, &error), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(error.message), "global_lse is 2; wanted 0 or 1");
  p.struct_size = offsetof(flashcore_backward_params, global_lse);  // a caller of version 0.1
  EXPECT_EQ(flashcore_attention_backward(&p, &error), FLASHCORE_OK) << error.message;
  EXPECT_EQ(gradient_difference(call_, want), "");
  p.struct_size = 8;
  EXPECT_EQ(flashcore_attention_backward(&p, &error), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("struct_size is 8"), std::string::npos);
  EXPECT_EQ(flashcore_attention_backward(nullptr, &error), FLASHCORE_INVALID_ARGUMENT);
}

TEST_F(BackwardApi, CTakesTheLseOfMoreKeys) {
  CCall forward(tensors_, call_.inputs.options);
  CTensor dout(gradients_.dout), dq(gradients_.dq);
  flashcore_backward_params p{};
  p.struct_size = sizeof p;
  p.call = &forward.params;
  p.dout = &dout.tensor;
  p.dq = &dq.tensor;
  const auto text = [&] {
    char words[4096] = "";
    flashcore_error error{};
    EXPECT_EQ(flashcore_backward_explain(&p, words, sizeof words, nullptr, &error), FLASHCORE_OK)
        << error.message;
    return std::string(words);
  };
  constexpr const char* kLine = "lse        taken as it is";
  EXPECT_EQ(text().find(kLine), std::string::npos);
  p.global_lse = 1;
  EXPECT_NE(text().find(kLine), std::string::npos);
}

}  // namespace
}  // namespace flashcore::test
