// Cancelled calls: status code, latency, outputs, and the calls after them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "bindings/python/polled_call.h"
#include "flashcore/flashcore.h"
#include "flashcore/quant.h"
#include "support/call.h"
#include "support/draw.h"
#include "support/to_c.h"

namespace flashcore::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kDelay = std::chrono::milliseconds(50);
// Upper bound of a cancelled call. One tile of LongCall takes seconds.
constexpr auto kSoon = std::chrono::seconds(1);
constexpr float kNotWritten = -7.f;

/// Four tiles of 64 rows, and 2^23 keys that share one row of memory.
struct LongCall {
  explicit LongCall(int threads = 1, int splits = 1) {
    tensors.q = view(q.data(), DType::f32, {1, 1, kRows, kDim}, {});
    tensors.out = view(out.data(), DType::f32, {1, 1, kRows, kDim}, {});
    tensors.k = tensors.v = view(keys.data(), DType::f32, {1, 1, 1 << 23, kDim}, {});
    tensors.k.strides[2] = tensors.v.strides[2] = 0;
    DeviceInfo device = *device_info(Device{});
    device.threads = threads;
    plan = *make_plan(*make_problem(tensors, {.num_splits = splits}), device);
  }
  bool is_untouched() const {
    return std::all_of(out.begin(), out.end(), [](float one) { return one == kNotWritten; });
  }

  static constexpr int kRows = 256, kDim = 64;
  std::vector<float> q = std::vector<float>(kRows * kDim, 0.5f);
  std::vector<float> keys = std::vector<float>(kDim, 0.5f);
  std::vector<float> out = std::vector<float>(kRows * kDim, kNotWritten);
  Tensors tensors;
  Plan plan;
};

/// Sets the flag while the call runs. Returns its status and checks that it ends within kSoon.
Status cancel_during(const std::function<Status(const std::int32_t* cancel)>& call,
                     Clock::duration delay = kDelay) {
  std::int32_t cancel = 0;
  const auto start = Clock::now();  // before the other thread starts to wait
  std::thread other([&] {
    std::this_thread::sleep_for(delay);
    __atomic_store_n(&cancel, 1, __ATOMIC_RELAXED);
  });
  Status status = call(&cancel);
  const auto elapsed = Clock::now() - start;
  other.join();
  EXPECT_GE(elapsed, delay);
  EXPECT_LT(elapsed, kSoon);
  return status;
}

/// Checks that a call in this workspace, which an earlier call has used, is correct.
void expect_correct_call(Workspace workspace) {
  Random random(5);
  Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                              {.batch = 2, .q_heads = 2, .q_len = 3, .kv_len = 500});
  inputs.options.num_splits = 4;
  Output output = make_output(inputs);
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  const Plan plan = *make_plan(*make_problem(tensors, inputs.options), *device_info(Device{}));
  ASSERT_LE(plan.workspace_bytes, workspace.bytes);
  ASSERT_TRUE(run(plan, tensors, workspace).ok());
  FLASHCORE_EXPECT_SAME(output, attend(inputs));
}

TEST(Cancel, BeforeTheCallItWritesNothing) {
  const LongCall call;
  const WorkspaceMemory workspace(call.plan.workspace_bytes);
  const std::int32_t cancel = 1;
  const auto start = Clock::now();
  const Status status = run(call.plan, call.tensors, workspace.get(), nullptr, &cancel);
  EXPECT_LT(Clock::now() - start, kSoon);
  EXPECT_EQ(status.code(), StatusCode::cancelled);
  EXPECT_NE(status.message().find("cancel"), std::string::npos) << status.message();
  EXPECT_TRUE(call.is_untouched());
}

TEST(Cancel, DuringTheCallItEndsSoon) {
  for (const int threads : {1, 3}) {
    for (const int splits : {1, 5}) {
      const LongCall call(threads, splits);
      EXPECT_EQ(call.plan.splits, splits);
      const WorkspaceMemory workspace(std::max<std::size_t>(call.plan.workspace_bytes, 4 << 20));
      const Status status = cancel_during([&](const std::int32_t* cancel) {
        return run(call.plan, call.tensors, workspace.get(), nullptr, cancel);
      });
      EXPECT_EQ(status.code(), StatusCode::cancelled) << threads << " threads, " << splits;
      expect_correct_call(workspace.get());
    }
  }
}

TEST(Cancel, AFlagThatStaysClearChangesNothing) {
  Random random(7);
  const Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                                    {.batch = 2, .q_heads = 2, .q_len = 70, .kv_len = 90});
  for (const bool is_polled : {false, true}) {
    Output output = make_output(inputs);
    const Tensors tensors = tensors_of(inputs, output.out, output.lse);
    const Plan plan = *make_plan(*make_problem(tensors, inputs.options), *device_info(Device{}));
    const WorkspaceMemory workspace(plan.workspace_bytes);
    const std::int32_t cancel = 0;
    if (is_polled) {
      flashcore_error error{};
      const CCall call(tensors, inputs.options);
      ASSERT_EQ(python::run_attention_polled(
                    call.params, [] { return false; }, &error),
                FLASHCORE_OK)
          << error.message;
    } else {
      const Status status = run(plan, tensors, workspace.get(), nullptr, &cancel);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    FLASHCORE_EXPECT_SAME(output, attend(inputs));
  }
}

/// Calls other than attention, on tensors of `rows` rows. All rows of an input share memory. Output
/// memory is not initialised, so that only written pages take physical memory.
class RowCalls {
 public:
  explicit RowCalls(std::int64_t rows) : rows_(rows) {
    std::iota(row_.begin(), row_.end(), 1.f);
    std::iota(int8_row_.begin(), int8_row_.end(), std::uint8_t{1});
  }

  /// The first `count` bytes of the output.
  std::vector<std::uint8_t> written(std::int64_t count) const {
    return {memory_.get(), memory_.get() + count};
  }
  void clear(std::int64_t count) { std::memset(memory_.get(), 0, static_cast<std::size_t>(count)); }

  Status quantize(const std::int32_t* cancel, std::int64_t block_rows = 0) {
    const TensorView scale = block_rows == 0 ? view(&scale_, DType::f32, {1}, {})
                                             : view(&scale_, DType::f32, {1, 1, 1}, {});
    return flashcore::quantize({input(row_.data(), DType::f32), output(DType::int8), scale},
                               {.block_rows = block_rows}, {}, nullptr, cancel);
  }
  /// Quantizes the same elements as one row.
  Status quantize_columns(const std::int32_t* cancel) {
    TensorView from = view(row_.data(), DType::f32, {rows_ * kDim}, {});
    from.strides[0] = 0;
    return flashcore::quantize({from, view(memory_.get(), DType::int8, {rows_ * kDim}, {}),
                                view(&scale_, DType::f32, {1}, {})},
                               {}, {}, nullptr, cancel);
  }
  Status quantize_rotated(const std::int32_t* cancel) {
    return flashcore::quantize({input(row_.data(), DType::f32), output(DType::int8),
                                view(&scale_, DType::f32, {1, 1, 1}, {})},
                               {.block_rows = rows_, .rotate = true}, {}, nullptr, cancel);
  }
  Status dequantize(const std::int32_t* cancel) {
    return flashcore::dequantize({input(int8_row_.data(), DType::int8), output(DType::f16),
                                  view(&scale_, DType::f32, {1}, {})},
                                 {}, nullptr, cancel);
  }
  Status append(const std::int32_t* cancel) {
    AppendTensors t;
    t.k_new = t.v_new = input(row_.data(), DType::f32);
    t.k = output(DType::int8);
    t.v = output(DType::int8, rows_ * kDim);
    t.seqused_k = view(&used_, DType::i32, {1}, {});
    return flashcore::append(t, {}, nullptr, cancel);
  }
  Status merge(const std::int32_t* cancel) {
    TensorView lse = view(row_.data(), DType::f32, {1, 1, rows_}, {});
    lse.strides[2] = 0;
    const std::vector<PartialResult> parts(kMaxMergeParts, {input(row_.data(), DType::f32), lse});
    return flashcore::merge(parts, output(DType::f16), {}, {}, nullptr, cancel);
  }

  static constexpr std::int64_t kDim = 64;

 private:
  TensorView input(void* row, DType dtype) const {
    TensorView all = view(row, dtype, {1, 1, rows_, kDim}, {});
    all.strides[2] = 0;
    return all;
  }
  TensorView output(DType dtype, std::int64_t offset = 0) {
    return view(memory_.get() + offset, dtype, {1, 1, rows_, kDim}, {});
  }

  std::int64_t rows_;
  std::vector<float> row_ = std::vector<float>(kDim);
  std::vector<std::uint8_t> int8_row_ = std::vector<std::uint8_t>(kDim);
  float scale_ = 0.5f;
  std::int32_t used_ = 0;
  std::unique_ptr<std::uint8_t[]> memory_{
      new std::uint8_t[static_cast<std::size_t>(2 * rows_ * kDim)]};  // not written yet
};

const struct {
  const char* name;
  Status (*call)(RowCalls&, const std::int32_t* cancel);
} kRowCalls[] = {
    {"quantize", [](RowCalls& w, const std::int32_t* cancel) { return w.quantize(cancel); }},
    {"quantize, one block",
     [](RowCalls& w, const std::int32_t* cancel) { return w.quantize(cancel, 1 << 30); }},
    {"quantize, one row",
     [](RowCalls& w, const std::int32_t* cancel) { return w.quantize_columns(cancel); }},
    {"quantize, rotated",
     [](RowCalls& w, const std::int32_t* cancel) { return w.quantize_rotated(cancel); }},
    {"dequantize", [](RowCalls& w, const std::int32_t* cancel) { return w.dequantize(cancel); }},
    {"append", [](RowCalls& w, const std::int32_t* cancel) { return w.append(cancel); }},
    {"merge", [](RowCalls& w, const std::int32_t* cancel) { return w.merge(cancel); }},
};

TEST(Cancel, OtherCallsEndSoon) {
  RowCalls calls(1 << 23);
  for (const auto& [name, call] : kRowCalls) {
    SCOPED_TRACE(name);
    const Status status =
        cancel_during([&](const std::int32_t* cancel) { return call(calls, cancel); },
                      std::chrono::milliseconds(20));
    EXPECT_EQ(status.code(), StatusCode::cancelled) << status.message();
  }
}

TEST(Cancel, OtherCallsWriteNothingIfTheFlagIsSetBefore) {
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kBytes = 2 * kRows * RowCalls::kDim;
  const std::int32_t set = 1, clear = 0;
  for (const auto& [name, call] : kRowCalls) {
    SCOPED_TRACE(name);
    RowCalls calls(kRows);
    calls.clear(kBytes);
    EXPECT_EQ(call(calls, &set).code(), StatusCode::cancelled);
    EXPECT_EQ(calls.written(kBytes), std::vector<std::uint8_t>(kBytes));
    ASSERT_TRUE(call(calls, nullptr).ok());
    const std::vector<std::uint8_t> correct = calls.written(kBytes);
    calls.clear(kBytes);
    ASSERT_TRUE(call(calls, &clear).ok());
    EXPECT_EQ(calls.written(kBytes), correct);
    EXPECT_NE(correct, std::vector<std::uint8_t>(kBytes));
  }
}

/// Calls a C function with a set flag, then with params that end before `cancel`.
template <typename Params>
void expect_flag_read(std::int32_t (*function)(const Params*, flashcore_error*), Params params) {
  const std::int32_t set = 1;
  flashcore_error error{};
  params.struct_size = sizeof params;
  EXPECT_EQ(function(&params, &error), FLASHCORE_OK) << error.message;
  params.cancel = &set;
  EXPECT_EQ(function(&params, &error), FLASHCORE_CANCELLED) << error.message;
  constexpr std::size_t kOlder = offsetof(Params, cancel);
  params.struct_size = kOlder;
  // Exact size: a sanitizer detects reads past it.
  const auto bytes = std::make_unique<unsigned char[]>(kOlder);
  std::memcpy(bytes.get(), &params, kOlder);
  EXPECT_EQ(function(reinterpret_cast<const Params*>(bytes.get()), &error), FLASHCORE_OK)
      << error.message;
  EXPECT_EQ(function(&params, &error), FLASHCORE_OK)
      << error.message;  // an older struct has no flag
  params.struct_size = kOlder - 8;
  EXPECT_EQ(function(&params, &error), FLASHCORE_INVALID_ARGUMENT) << error.message;
}

TEST(Cancel, EveryCStructHasTheFlag) {
  float row[4] = {1, 2, 3, 4}, merged[4], scale = 1, lse = 0;
  std::uint8_t codes[4], more_codes[4];
  std::int32_t used = 0;
  const CTensor wide(view(row, DType::f32, {1, 1, 1, 4}, {}));
  const CTensor out(view(merged, DType::f32, {1, 1, 1, 4}, {}));
  const CTensor eight(view(codes, DType::int8, {1, 1, 1, 4}, {}));
  const CTensor more(view(more_codes, DType::int8, {1, 1, 1, 4}, {}));
  const CTensor one(view(&scale, DType::f32, {1}, {}));
  const CTensor lses(view(&lse, DType::f32, {1, 1, 1}, {}));
  const CTensor lengths(view(&used, DType::i32, {1}, {}));
  flashcore_quant_params quant{};
  quant.from = &wide.tensor;
  quant.to = &eight.tensor;
  quant.scale = &one.tensor;
  expect_flag_read(flashcore_quantize, quant);
  quant.from = &eight.tensor;
  quant.to = &out.tensor;
  expect_flag_read(flashcore_dequantize, quant);
  flashcore_append_params append{};
  append.k_new = append.v_new = &wide.tensor;
  append.k = &eight.tensor;
  append.v = &more.tensor;
  append.used_k = &lengths.tensor;
  expect_flag_read(flashcore_append, append);
  flashcore_merge_params merge{};
  merge.outs = &wide.tensor;
  merge.lses = &lses.tensor;
  merge.parts = 1;
  merge.out = &out.tensor;
  expect_flag_read(flashcore_merge, merge);
}

TEST(PolledCall, StopsIfThePollReturnsTrue) {
  const LongCall call;
  CCall c(call.tensors, {});
  c.params.threads = 2;
  int polls = 0;
  const auto caller = std::this_thread::get_id();
  const auto start = Clock::now();
  flashcore_error error{};
  const auto stop = [&] {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    return ++polls == 3;
  };
  EXPECT_EQ(python::run_attention_polled(c.params, stop, &error), FLASHCORE_CANCELLED);
  EXPECT_LT(Clock::now() - start, kSoon);
  EXPECT_EQ(error.code, FLASHCORE_CANCELLED);
  EXPECT_EQ(polls, 3);
  EXPECT_TRUE(call.is_untouched());
}

TEST(PolledCall, StopsAnyCall) {
  RowCalls calls(1 << 23);
  const auto append = [&](const std::int32_t* cancel, flashcore_error*) {
    return static_cast<std::int32_t>(calls.append(cancel).code());
  };
  const auto start = Clock::now();
  EXPECT_EQ(python::run_polled(
                append, [] { return true; }, nullptr),
            FLASHCORE_CANCELLED);
  EXPECT_LT(Clock::now() - start, kSoon);
}

TEST(PolledCall, ReturnsTheErrorOfTheCall) {
  LongCall call;
  call.tensors.out.data = nullptr;
  const CCall c(call.tensors, {});
  flashcore_error error{};
  EXPECT_EQ(python::run_attention_polled(
                c.params, [] { return false; }, &error),
            FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(error.code, FLASHCORE_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(error.message, "out"), nullptr) << error.message;
}

/// Only long calls run in a separate thread.
TEST(PolledCall, DistinguishesLongCalls) {
  const LongCall call;
  CCall c(call.tensors, {});
  EXPECT_TRUE(python::is_long(c.params));
  c.tensors[1].shape[2] = 16;  // k
  EXPECT_FALSE(python::is_long(c.params));
  c.params.k = nullptr;
  EXPECT_FALSE(python::is_long(c.params));

  float value = 0;
  const CTensor small(view(&value, DType::f32, {1, 1, 1, 64}, {}));
  const CTensor large(view(&value, DType::f32, {1, 1, 1 << 20, 64}, {}));
  flashcore_quant_params quant{};
  EXPECT_FALSE(python::is_long(quant));
  quant.from = quant.to = &small.tensor;
  EXPECT_FALSE(python::is_long(quant));
  quant.from = quant.to = &large.tensor;
  EXPECT_TRUE(python::is_long(quant));
  flashcore_append_params append{};
  append.k_new = append.v_new = &large.tensor;
  EXPECT_FALSE(python::is_long(append));
  append.k = &small.tensor;
  EXPECT_TRUE(python::is_long(append));
  flashcore_merge_params merge{};
  merge.out = &small.tensor;
  merge.parts = 32;
  EXPECT_FALSE(python::is_long(merge));
  merge.out = &large.tensor;
  EXPECT_TRUE(python::is_long(merge));
}

}  // namespace
}  // namespace flashcore::test
