// Stages of correct kernels pass with every option, and a single wrong value is located.
// scripts/checks/faults and tests/cli/test_faults.py cover injected faults.
#include "check/stages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "check/trace.h"
#include "support/kernel_test.h"
#include "support/rounds.h"
#include "unit/api/faulty_backend.h"

namespace flashcore::test {
namespace {

using verify::HostCall;
using verify::Stage;
using verify::StageReport;

/// Enough keys for several tiles of every kernel.
verify::CaseSpec several_tiles(DType dtype) {
  verify::CaseSpec spec;
  spec.dtype = dtype;
  spec.batch = 2, spec.q_heads = 4, spec.kv_heads = 2;
  spec.q_len = 9, spec.kv_len = 290, spec.head_dim = 16, spec.v_dim = 24;
  return spec;
}

std::vector<verify::CaseSpec> specs(DType dtype) {
  std::vector<verify::CaseSpec> all(4, several_tiles(dtype));
  for (verify::CaseSpec& spec : all) {  // fewer heads under a sanitizer
    spec.batch = spec.kv_heads = std::min(rounds(2), 2);
    spec.q_heads = 2 * spec.kv_heads;
  }
  all[1].options.causal = true;
  all[1].q_len = 300;  // the first queries see no key
  all[1].sinks = true;
  all[1].sigma = 10;  // P is readable only with scaled scores
  all[2].bias = all[2].mask = {true, true, true, true};
  all[2].alibi = 1;
  all[2].options.softcap = 3;
  all[2].options.window_left = 40;
  all[2].q_layout = all[2].v_layout = verify::MemoryLayout::padded;
  all[3].q_varlen = all[3].kv_varlen = all[3].used_k = all[3].q_start = all[3].k_start = true;
  all[3].lse = true;
  return all;
}

StageReport check(Stage stage, const Backend& backend, const char* kernel, const HostCall& call) {
  verify::CallRunner runner(backend, {}, *device_info({}), kernel);
  const Result<StageReport> report = verify::check_stage(stage, runner, call);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return report.ok() ? *report : StageReport{};
}

class StagesOf : public KernelTest {};

TEST_P(StagesOf, AreCorrect) {
  for (const verify::CaseSpec& spec : specs(dtype())) {
    const HostCall call = verify::random_call(spec);
    for (const Stage stage : verify::kStages) {
      SCOPED_TRACE(to_string(spec) + ", " + verify::to_string(stage));
      const StageReport r = check(stage, cpu_backend(), kernel().id, call);
      EXPECT_TRUE(r.ok()) << r.reason << ", " << verify::to_string(r.worst) << ", " << r.probe;
      EXPECT_EQ(r.skipped, "");
      EXPECT_GT(r.elements, 0);
      EXPECT_EQ(r.wrong, 0);
      EXPECT_LE(r.worst_ratio, 1);
      EXPECT_EQ(r.unmeasured, 0) << "P is too small to read although scores are scaled";
    }
  }
}

TEST_P(StagesOf, TracesAreCorrect) {
  for (const verify::CaseSpec& spec : specs(dtype())) {
    for (const int splits : {1, 2}) {
      HostCall call = verify::random_call(spec);
      call.options.num_splits = splits;
      verify::CallRunner runner(cpu_backend(), {}, *device_info({}), kernel().id);
      const auto last_batch = static_cast<std::int32_t>(spec.batch - 1);
      const auto last_head = static_cast<std::int32_t>(spec.q_heads - 1);
      // A sequence of the varlen case may have no queries.
      const reference::RowId row = spec.q_varlen ? reference::RowId{0, last_head, 0}
                                                 : reference::RowId{last_batch, last_head, 8};
      const Result<verify::Trace> trace = verify::trace_row(runner, call, row);
      if (spec.q_varlen && !trace.ok()) continue;
      ASSERT_TRUE(trace.ok()) << trace.status().message();
      EXPECT_TRUE(trace->ok());
      std::int64_t next = 0;
      for (const verify::TracedTile& tile : trace->tiles) {
        EXPECT_EQ(tile.begin, next) << "tiles are adjacent";
        EXPECT_EQ(tile.keys.size(), static_cast<std::size_t>(tile.end - tile.begin));
        next = tile.end;
      }
    }
  }
}

FLASHCORE_FOR_EACH_KERNEL(StagesOf);

/// kv_len equals v_dim, so that one-hot V needs one run and reads each value once.
verify::CaseSpec one_run() {
  verify::CaseSpec spec;
  spec.batch = 2, spec.q_heads = 2, spec.kv_heads = 1;
  spec.q_len = 7, spec.kv_len = 40, spec.head_dim = 16, spec.v_dim = 40;
  spec.lse = true;
  return spec;
}

/// Adds 0.01 to element (1, 0, 5, 33) of out. It has the same address in every probe of an f32
/// call.
FaultyBackend one_wrong_output(const HostCall& call) {
  const auto* out = static_cast<const std::byte*>(call.tensors.out.data);
  const std::int64_t element = ((1 * 2 + 0) * 7 + 5) * 40 + 33;
  return FaultyBackend({.block_bytes = call.bytes.size(),
                        .offset = static_cast<std::size_t>(out - call.bytes.data() + element * 4),
                        .add = 0.01f});
}

void expect_row(const StageReport& r) {
  EXPECT_FALSE(r.ok());
  EXPECT_GT(r.worst_ratio, 1);
  EXPECT_EQ(r.worst.row, (reference::RowId{1, 0, 5}));
}

TEST(Stages, OneWrongProbabilityIsFound) {
  const HostCall call = verify::random_call(one_run());
  const FaultyBackend backend = one_wrong_output(call);
  const StageReport r = check(Stage::probabilities, backend, "fwd_generic_f32", call);
  expect_row(r);
  EXPECT_EQ(r.wrong, 1);
  EXPECT_EQ(r.worst.key, 33);
  EXPECT_EQ(r.reason, "errors exceed their bounds");
  EXPECT_EQ(verify::to_string(r.worst), "batch 1, head 0, row 5, key 33");
}

TEST(Stages, OneWrongScoreIsFound) {
  const HostCall call = verify::random_call(one_run());
  const FaultyBackend backend = one_wrong_output(call);
  const StageReport r = check(Stage::scores, backend, "fwd_generic_f32", call);
  expect_row(r);
  EXPECT_EQ(r.wrong, 1);
  EXPECT_EQ(r.worst.key, 33);
}

TEST(Stages, OneWrongLseIsNotReportedAsAScore) {
  const HostCall call = verify::random_call(one_run());
  const auto* lse = static_cast<const std::byte*>(call.tensors.lse.data);
  const FaultyBackend backend(
      {.block_bytes = call.bytes.size(),
       .offset = static_cast<std::size_t>(lse - call.bytes.data() + ((1 * 2 + 0) * 7 + 5) * 4),
       .add = 0.01f});
  const StageReport r = check(Stage::scores, backend, "fwd_generic_f32", call);
  expect_row(r);
  EXPECT_EQ(r.wrong, 1 + 40) << "the LSE and the 40 scores computed from it";
  EXPECT_NE(r.note.find("P is correct"), std::string::npos);
  EXPECT_TRUE(check(Stage::probabilities, backend, "fwd_generic_f32", call).ok());
  EXPECT_TRUE(check(Stage::pv, backend, "fwd_generic_f32", call).ok());
}

TEST(Stages, OneWrongOutputIsFoundInBothProbes) {
  const HostCall call = verify::random_call(one_run());
  const FaultyBackend backend = one_wrong_output(call);
  const StageReport r = check(Stage::pv, backend, "fwd_generic_f32", call);
  expect_row(r);
  EXPECT_EQ(r.wrong, 2);
  EXPECT_EQ(r.worst.column, 33);
}

TEST(Stages, OneWrongPartialIsFound) {
  verify::CaseSpec spec = several_tiles(DType::f32);
  spec.options.num_splits = 2;
  const HostCall call = verify::random_call(spec);
  const std::size_t rows = 2 * 4 * 9;
  const FaultyBackend backend(
      {.block_bytes = 2 * rows * 4, .offset = (rows + (1 * 4 + 2) * 9 + 3) * 4, .add = 0.01f});
  const StageReport r = check(Stage::partials, backend, "fwd_generic_f32", call);
  EXPECT_FALSE(r.ok());
  EXPECT_EQ(r.wrong, 1);
  EXPECT_EQ(verify::to_string(r.worst), "batch 1, head 2, row 3, split 1, LSE");
}

TEST(Stages, AWrongCombineIsFound) {
  verify::CaseSpec spec = several_tiles(DType::f32);
  spec.sinks = true;
  const HostCall call = verify::random_call(spec);
  const FaultyBackend backend({.forget_sinks = true});
  const StageReport r = check(Stage::combine, backend, "fwd_generic_f32", call);
  EXPECT_FALSE(r.ok());
  EXPECT_EQ(r.probe, "the oracle's partial results combined");
  for (const Stage stage : {Stage::scores, Stage::probabilities, Stage::pv, Stage::partials}) {
    EXPECT_TRUE(check(stage, backend, "fwd_generic_f32", call).ok()) << verify::to_string(stage);
  }
}

TEST(Stages, ATraceLocatesTheTile) {
  const HostCall call = verify::random_call(one_run());
  // The trace appends used_k, q_start and k_start to the call's memory.
  const HostCall longer = [&] {
    HostCall copy = call;
    for (const auto tensor : {&Tensors::seqused_k, &Tensors::q_start, &Tensors::k_start}) {
      copy.place(tensor, DType::i32, {2});
    }
    return copy;
  }();
  const auto* out = static_cast<const std::byte*>(longer.tensors.out.data);
  const std::int64_t element = ((1 * 2 + 0) * 7 + 5) * 40 + 33;
  const FaultyBackend backend(
      {.block_bytes = longer.bytes.size(),
       .offset = static_cast<std::size_t>(out - longer.bytes.data() + element * 4),
       .add = 0.01f});
  verify::CallRunner runner(backend, {}, *device_info({}), "fwd_generic_f32");
  const Result<verify::Trace> wrong = verify::trace_row(runner, call, {1, 0, 5});
  ASSERT_TRUE(wrong.ok()) << wrong.status().message();
  EXPECT_FALSE(wrong->ok());
  EXPECT_EQ(wrong->tiles.back().worst_column(), 33u);
  const Result<verify::Trace> correct = verify::trace_row(runner, call, {1, 0, 4});
  ASSERT_TRUE(correct.ok()) << correct.status().message();
  EXPECT_TRUE(correct->ok());
  EXPECT_FALSE(verify::trace_row(runner, call, {2, 0, 0}).ok());
  EXPECT_FALSE(verify::trace_row(runner, call, {0, -1, 0}).ok());
  EXPECT_FALSE(verify::trace_row(runner, call, {0, 0, 7}).ok());
}

TEST(Stages, ASkippedStageSaysWhy) {
  verify::CaseSpec spec = one_run();
  const auto skipped = [](Stage stage, const HostCall& call) {
    return check(stage, cpu_backend(), "fwd_generic_f32", call).skipped;
  };
  EXPECT_NE(skipped(Stage::partials, verify::random_call(spec)).find("one tile"),
            std::string::npos);
  spec.options.num_splits = 1;
  EXPECT_NE(skipped(Stage::combine, verify::random_call(spec)).find("num_splits is 1"),
            std::string::npos);
  spec.options.num_splits = 0;
  spec.options.reproducibility = Reproducibility::batch_invariant;
  EXPECT_NE(skipped(Stage::partials, verify::random_call(spec)).find("batch-invariant"),
            std::string::npos);
}

TEST(Stages, RejectNan) {
  verify::CaseSpec spec = one_run();
  HostCall call = verify::random_call(spec);
  static_cast<float*>(call.tensors.q.data)[0] = std::nanf("");
  verify::CallRunner runner(cpu_backend(), {}, *device_info({}), "fwd_generic_f32");
  const Result<StageReport> report = verify::check_stage(Stage::scores, runner, call);
  ASSERT_FALSE(report.ok());
  EXPECT_NE(report.status().message().find("finite inputs"), std::string::npos);
}

/// 8-bit inputs with different scales in every head and block.
verify::CaseSpec eight_bit(DType format, verify::ScaleKind scales) {
  verify::CaseSpec spec = several_tiles(DType::f16);
  spec.q_storage = spec.k_storage = spec.v_storage = format;
  spec.q_scale = spec.k_scale = spec.v_scale = scales;
  spec.options.q_scale_block = 4, spec.options.kv_scale_block = 50;
  return spec;
}

/// All 8-bit formats; one under a sanitizer.
std::span<const DType> tested_formats() {
  static constexpr DType kFormats[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};
  return std::span(kFormats).first(static_cast<std::size_t>(std::min(rounds(4), 4)));
}

TEST(Stages, OfEightBitInputsAreCorrect) {
  for (const DType format : tested_formats()) {
    for (const auto scales : {verify::ScaleKind::none, verify::ScaleKind::per_block}) {
      const HostCall call = verify::random_call(eight_bit(format, scales));
      const std::vector<Stage> stages = verify::stages_of(call.tensors);
      ASSERT_EQ(stages.front(), Stage::dequant);
      for (const Stage stage : stages) {
        SCOPED_TRACE(std::string(to_string(format)) + ", " + verify::to_string(stage));
        const StageReport r = check(stage, cpu_backend(), "fwd_generic_f16", call);
        EXPECT_TRUE(r.ok()) << r.reason << ", " << verify::to_string(r.worst) << ", " << r.probe;
        EXPECT_EQ(r.skipped, "");
        EXPECT_GT(r.elements, 0);
      }
    }
  }
}

/// The scale of one block is wrong. Dequant fails, and its worst element is in that block.
TEST(Stages, OneWrongScaleShowsInDequant) {
  for (const DType format : tested_formats()) {
    const HostCall call = verify::random_call(eight_bit(format, verify::ScaleKind::per_block));
    const std::pair<const char*, const TensorView*> scales[] = {
        {"Q", &call.tensors.q_scale}, {"K", &call.tensors.k_scale}, {"V", &call.tensors.v_scale}};
    for (const auto& [name, scale] : scales) {
      SCOPED_TRACE(std::string(to_string(format)) + ", " + name);
      Fault fault;
      fault.doubled_from_bytes = call.bytes.size();
      // Batch 1, head 1, block 1.
      const std::int64_t element = scale->strides[0] + scale->strides[1] + scale->strides[2];
      fault.offset = static_cast<std::size_t>(
          reinterpret_cast<const std::byte*>(static_cast<const float*>(scale->data) + element) -
          call.bytes.data());
      const StageReport r = check(Stage::dequant, FaultyBackend(fault), "fwd_generic_f16", call);
      EXPECT_FALSE(r.ok());
      EXPECT_GT(r.wrong, 0);
      EXPECT_LT(r.wrong, r.elements / 2);
      EXPECT_EQ(r.probe.substr(0, 1), name);
      EXPECT_EQ(r.worst.row.b, 1);
      EXPECT_EQ(name[0] == 'Q' ? r.worst.row.h : r.worst.row.h / 2, 1);
    }
  }
}

TEST(Stages, DequantIsSkippedWithout8BitInputs) {
  const HostCall call = verify::random_call(one_run());
  EXPECT_NE(check(Stage::dequant, cpu_backend(), "fwd_generic_f32", call).skipped, "");
}

TEST(Stages, Names) {
  EXPECT_EQ(verify::stage_named("dequant"), Stage::dequant);
  for (const Stage stage : verify::kStages) {
    EXPECT_EQ(verify::stage_named(verify::to_string(stage)), stage);
  }
  EXPECT_FALSE(verify::stage_named("softmax").has_value());
}

}  // namespace
}  // namespace flashcore::test
