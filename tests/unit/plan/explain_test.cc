// explain(): its text contains the plan's numbers and reasons, for every named device.
#include <gtest/gtest.h>

#include <cstdarg>
#include <cstdio>
#include <string>

#include "plan/devices.h"
#include "plan/planner.h"
#include "support/call.h"

namespace flashcore {
namespace {

[[gnu::format(printf, 1, 2)]] std::string text_of(const char* format, ...) {
  char text[256];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

Plan plan_for(const DeviceInfo& device, DType dtype, std::int64_t q_len, std::int64_t kv_len,
              std::int64_t dim, const Options& options = {}) {
  return *make_plan(*dense_problem(dtype, 2, 8, 4, q_len, kv_len, dim, dim, options, device.device),
                    device);
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in\n" << text;
}

/// Checks the lines that every explanation has.
void expect_facts(const Plan& plan) {
  const std::string text = explain(plan);
  const Problem& p = plan.problem;
  expect_contains(text, plan.kernel->id);
  expect_contains(text, plan.device.name);
  expect_contains(text, text_of("%s  batch %lld", to_string(p.dtype), (long long)p.batch));
  expect_contains(text,
                  text_of("q_len %lld  kv_len %lld", (long long)p.q_len, (long long)p.kv_len));
  const std::string heads =
      plan.heads_in_tile > 1 ? text_of(" of %d heads", plan.heads_in_tile) : std::string();
  expect_contains(text, text_of("%d rows%s x %d keys, %lld work tiles", plan.tile_q, heads.c_str(),
                                plan.tile_k, (long long)plan.num_tiles));
  expect_contains(text, text_of("splits     %d", plan.splits));
  if (plan.splits > 1) {
    expect_contains(text, text_of("of %lld keys", (long long)plan.keys_per_split));
  }
  expect_contains(text, text_of("workspace  %zu bytes", plan.workspace_bytes));

  const Cost c = cost(p);
  const bool tensor_cores = uses_tensor_cores(traits_of(*plan.kernel));
  const double tflops = tensor_cores ? plan.device.tensor16_tflops : plan.device.f32_tflops;
  const double arithmetic_us = c.flops / tflops / 1e6;
  const double memory_us = c.bytes / plan.device.memory_gbs / 1e3;
  expect_contains(text, text_of("arithmetic %.3g us", arithmetic_us));
  expect_contains(text, text_of("memory %.3g us", memory_us));
  EXPECT_EQ(text.find("does not use them") != std::string::npos,
            !tensor_cores && p.dtype != DType::f32 && plan.device.tensor16_tflops > 0);
  expect_contains(
      text, std::string("bound      ") + (arithmetic_us >= memory_us ? "arithmetic" : "memory"));

  // Every other kernel of this device and type is named with a reason.
  const std::string not_used = text.substr(text.find("not used"));
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != Operation::fwd || kernel.device != plan.kernel->device ||
        kernel.dtype != p.dtype) {
      continue;
    }
    const std::size_t line = not_used.find(std::string("  ") + kernel.id + " ");
    if (&kernel == plan.kernel) {
      EXPECT_EQ(line, std::string::npos);
      continue;
    }
    ASSERT_NE(line, std::string::npos) << kernel.id;
    const Reject reject = supports(kernel, p, plan.device);
    const std::string rest = not_used.substr(line, not_used.find('\n', line) - line);
    if (reject == Reject::head_dim) expect_contains(rest, std::to_string(kernel.head_dim));
    if (reject == Reject::shared_memory) {
      expect_contains(rest, std::to_string(kernel.smem_bytes));
      expect_contains(rest, std::to_string(plan.device.smem_per_block_bytes));
    }
    if (reject == Reject::isa) expect_contains(rest, to_string(kernel.isa));
    EXPECT_EQ(rest.find("can run the problem"), std::string::npos) << rest;
  }
}

TEST(Explain, IsCompleteForEveryDevice) {
  for (const NamedDevice& device : named_devices()) {
    SCOPED_TRACE(device.name);
    for (const std::int64_t q_len : {1, 512, 4096}) {
      for (const std::int64_t dim : {64, 128, 300, 576}) {
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          expect_facts(plan_for(device.info, dtype, q_len, 4096, dim));
        }
      }
    }
  }
}

TEST(Explain, GivesTheReasonForTheKernel) {
  const DeviceInfo h200 = *named_device("h200");
  expect_contains(explain(plan_for(h200, DType::f16, 4096, 4096, 64)), "fill the SMs");
  expect_contains(explain(plan_for(h200, DType::f16, 64, 4096, 64)), "as many SMs as possible");
  expect_contains(explain(plan_for(*named_device("cpu-avx2"), DType::f16, 64, 64, 64)),
                  "widest instruction set of this CPU with kernels is avx2");
  Options options;
  options.kernel = "fwd_simt_f16_d576_q16";
  expect_contains(explain(plan_for(h200, DType::f16, 64, 64, 64, options)),
                  "requested by the caller");
}

TEST(Explain, NamesTheOptions) {
  Options options;
  options.causal = true;
  options.window_left = 37;
  options.softcap = 12.5;
  options.reproducibility = Reproducibility::batch_invariant;
  options.checked = true;
  const std::string text =
      explain(plan_for(*named_device("h200"), DType::f16, 64, 64, 64, options));
  for (const char* word :
       {"causal", "window (37, -1)", "softcap 12.5", "batch-invariant", "checked"}) {
    expect_contains(text, word);
  }
}

TEST(Explain, NamesTheKeyRangesOfBatchInvariantCalls) {
  const DeviceInfo h200 = *named_device("h200");
  const Options invariant{.reproducibility = Reproducibility::batch_invariant};
  expect_contains(explain(plan_for(h200, DType::bf16, 1, 8192, 128, invariant)),
                  "up to 5 ranges of 1920 keys, on several CTAs, merged in order");
  expect_contains(explain(plan_for(h200, DType::bf16, 30000, 8192, 128, invariant)),
                  "up to 5 ranges of 1920 keys, one after the other, merged in order");
}

TEST(Explain, NamesTensorsAndAccess) {
  test::Inputs inputs;
  inputs.q = test::Tensor(DType::f32, {1, 2, 3, 8});
  inputs.k = inputs.v = test::Tensor(DType::f32, {1, 2, 5, 8});
  inputs.bias = test::Tensor(DType::f32, {1, 1, 1, 5});
  inputs.sinks = test::Tensor(DType::f32, {2});
  inputs.used_k = test::ints({4});
  inputs.q_start = test::ints({0});
  const auto explained = [&](test::MemoryLayout layout) {
    const test::Output output = test::make_output(inputs, {.out_layout = layout});
    const Problem problem =
        *make_problem(test::tensors_of(inputs, output.out, output.lse), inputs.options);
    return explain(*make_plan(problem, *named_device("cpu-neon")));
  };
  const std::string text = explained(test::MemoryLayout::heads_first);
  for (const char* word :
       {"bias", "sinks", "variable lengths", "given positions", "LSE", "16 bytes at a time"}) {
    expect_contains(text, word);
  }
  expect_contains(explained(test::MemoryLayout::strided_columns), "not contiguous");
  expect_contains(explained(test::MemoryLayout::misaligned), "not 16-byte aligned");
}

TEST(Explain, ReportsUnknownRates) {
  DeviceInfo device = *named_device("cpu-neon");
  device.f32_tflops = device.memory_gbs = 0;
  expect_contains(explain(plan_for(device, DType::f32, 64, 64, 64)), "unknown");
}

TEST(Explain, ReportsAnEmptyPlan) { expect_contains(explain(Plan{}), "make_plan()"); }

}  // namespace
}  // namespace flashcore
