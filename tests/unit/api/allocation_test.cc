// Every public call with each of its allocations failing in turn. The call succeeds or returns
// out_of_memory, and the next call works.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "support/draw.h"
#include "support/to_c.h"
#include "unit/api/failing_new.h"

extern char** environ;

namespace flashcore::test {
namespace {

constexpr StatusCode kOk = StatusCode::ok;
constexpr long kMaxAllocations = 2000;

/// Calls `call` with allocation 0, 1, 2, ... failing until none fails. `call` returns a StatusCode;
/// `expected` is its result if no allocation fails.
template <typename Call>
void with_every_allocation_failing(const char* name, StatusCode expected, Call call) {
  SCOPED_TRACE(name);
  for (const Failing failing : {Failing::once, Failing::from_then_on}) {
    bool failed = true;
    for (long n = 0; failed; ++n) {
      ASSERT_LT(n, kMaxAllocations);
      fail_allocation(n, failing);
      const StatusCode code = call();
      failed = stop_failing();
      if (failed) {
        ASSERT_TRUE(code == expected || code == StatusCode::out_of_memory)
            << "allocation " << n << ": " << to_string(code);
      } else {
        ASSERT_EQ(code, expected);
      }
    }
  }
}

StatusCode encode(const Status& status) { return status.code(); }
template <typename T>
StatusCode encode(const Result<T>& result) {
  return result.status().code();
}

class Allocation : public testing::Test {
 protected:
  Allocation() : workspace_(16 << 20) {
    Random random(1);
    inputs_ = draw_inputs(random, *runnable_kernels().front(),
                          {.batch = 2,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .q_len = 70,
                           .kv_len = 300,
                           .head_dim = 16,
                           .v_dim = 16});
    inputs_.options.num_splits = 2;
    want_ = attend(inputs_);
    output_ = make_output(inputs_);
    tensors_ = tensors_of(inputs_, output_.out, output_.lse);
    info_ = *device_info(Device{});
    info_.threads = 4;
    problem_ = *make_problem(tensors_, inputs_.options);
    plan_ = *make_plan(problem_, info_);
  }
  /// After any failed allocation, the next call returns the correct result.
  void TearDown() override {
    output_.out.fill(0);
    ASSERT_TRUE(run(plan_, tensors_, workspace_.get()).ok());
    FLASHCORE_EXPECT_SAME(output_, want_);
  }

  WorkspaceMemory workspace_;
  Inputs inputs_;
  Output want_, output_;
  Tensors tensors_;
  DeviceInfo info_;
  Problem problem_;
  Plan plan_;
};

TEST_F(Allocation, TheInjectionWorks) {
  fail_allocation(1, Failing::once);
  std::string first(100, 'a');
  EXPECT_THROW(std::string(100, 'b'), std::bad_alloc);
  EXPECT_EQ(std::string(100, 'c').size(), 100u);
  EXPECT_TRUE(stop_failing());
  fail_allocation(0, Failing::from_then_on);
  EXPECT_EQ(::operator new(8, std::nothrow), nullptr);
  EXPECT_EQ(::operator new(8, std::nothrow), nullptr);
  EXPECT_TRUE(stop_failing());
  EXPECT_FALSE(stop_failing());
}

TEST_F(Allocation, Problems) {
  with_every_allocation_failing("make_problem", kOk,
                                [&] { return encode(make_problem(tensors_, inputs_.options)); });
  Tensors bad = tensors_;
  bad.k.shape[3] = 17;
  with_every_allocation_failing("make_problem: shape", StatusCode::invalid_argument,
                                [&] { return encode(make_problem(bad, inputs_.options)); });
  bad = tensors_;
  bad.out.data = bad.q.data;
  with_every_allocation_failing("make_problem: memory", StatusCode::invalid_argument,
                                [&] { return encode(make_problem(bad, inputs_.options)); });
  with_every_allocation_failing("dense_problem", StatusCode::unsupported, [] {
    return encode(dense_problem(DType::f32, 1, 1, 1, 1, 1, 1000, 1));
  });
}

TEST_F(Allocation, Plans) {
  with_every_allocation_failing("make_plan", kOk,
                                [&] { return encode(make_plan(problem_, info_)); });
  Problem forced = problem_;
  forced.options.kernel = "fwd_of_dreams_that_are_long_enough_to_need_memory";
  with_every_allocation_failing("make_plan: unknown kernel", StatusCode::invalid_argument,
                                [&] { return encode(make_plan(forced, info_)); });
  forced.options.kernel = "fwd_simt_f32_d64_q64";
  with_every_allocation_failing("make_plan: wrong kernel", StatusCode::unsupported,
                                [&] { return encode(make_plan(forced, info_)); });
  const DeviceInfo h200 = *named_device("h200");
  with_every_allocation_failing("make_plan: wrong device", StatusCode::invalid_argument,
                                [&] { return encode(make_plan(problem_, h200)); });
}

TEST_F(Allocation, Explain) {
  // explain() returns a string: it may throw bad_alloc, but nothing else.
  with_every_allocation_failing("explain", kOk, [&] {
    try {
      return explain(plan_).empty() ? StatusCode::internal : kOk;
    } catch (const std::bad_alloc&) {
      return StatusCode::out_of_memory;
    }
  });
}

TEST_F(Allocation, Devices) {
  with_every_allocation_failing("device_info", kOk, [] { return encode(device_info(Device{})); });
  if (cuda_availability().device_count == 0) {
    with_every_allocation_failing("device_info: cuda", StatusCode::unsupported, [] {
      return encode(device_info({DeviceType::cuda, 0}));
    });
    DeviceInfo gpu = *named_device("h200");
    with_every_allocation_failing("measure_rates: cuda", StatusCode::unsupported,
                                  [&] { return encode(measure_rates(gpu)); });
  }
  with_every_allocation_failing("named_device", StatusCode::invalid_argument,
                                [] { return encode(named_device("a device that is not known")); });
  with_every_allocation_failing("cuda_availability", kOk, [] {
    static_cast<void>(cuda_availability());
    return kOk;
  });
  DeviceInfo info = info_;
  info.threads = 1;
  with_every_allocation_failing("measure_rates", kOk, [&] { return encode(measure_rates(info)); });
}

TEST_F(Allocation, Run) {
  with_every_allocation_failing("run", kOk,
                                [&] { return encode(run(plan_, tensors_, workspace_.get())); });
  Workspace small = workspace_.get();
  small.bytes = 100;
  with_every_allocation_failing("run: workspace", StatusCode::invalid_argument,
                                [&] { return encode(run(plan_, tensors_, small)); });
  with_every_allocation_failing("run: empty plan", StatusCode::invalid_argument,
                                [&] { return encode(run(Plan{}, tensors_, workspace_.get())); });
  Tensors other = tensors_;
  other.lse = {};
  with_every_allocation_failing("run: other tensors", StatusCode::invalid_argument,
                                [&] { return encode(run(plan_, other, workspace_.get())); });
  Tensor used = ints({300, 301});
  Tensors checked = tensors_;
  checked.seqused_k = used.view();
  Options options = inputs_.options;
  options.checked = true;
  const Plan checked_plan = *make_plan(*make_problem(checked, options), info_);
  with_every_allocation_failing("run: bad length", StatusCode::invalid_argument, [&] {
    return encode(run(checked_plan, checked, workspace_.get()));
  });
  with_every_allocation_failing("workspace_status", StatusCode::invalid_argument, [&] {
    // Reading clears the slot, so each attempt needs a call that fills it.
    static_cast<void>(run(checked_plan, checked, workspace_.get()));
    return encode(workspace_status(workspace_.get()));
  });
  with_every_allocation_failing("workspace_init", kOk,
                                [&] { return encode(workspace_init(workspace_.get())); });
  with_every_allocation_failing("workspace_init: null", StatusCode::invalid_argument,
                                [] { return encode(workspace_init({})); });
}

TEST_F(Allocation, RunWithAGrowingThreadPool) {
  // Each iteration uses one thread more, so the pool grows while allocations fail.
  int threads = 5;
  for (long n = 0; n < 6; ++n) {
    for (const Failing failing : {Failing::once, Failing::from_then_on}) {
      DeviceInfo more = info_;
      more.threads = threads++;
      const Plan plan = *make_plan(problem_, more);
      fail_allocation(n, failing);
      const StatusCode code = encode(run(plan, tensors_, workspace_.get()));
      stop_failing();
      ASSERT_EQ(code, kOk) << "run() allocates only for new threads and works without them";
      FLASHCORE_EXPECT_SAME(output_, want_);
    }
  }
}

TEST_F(Allocation, Merge) {
  Random random(2);
  const Tensor out = draw_normal(random, DType::f32, {2, 4, 70, 16});
  const Tensor lse = draw_normal(random, DType::f32, {2, 4, 70});
  Tensor result(DType::f32, {2, 4, 70, 16});
  const PartialResult parts[] = {{out.view(), lse.view()}, {out.view(), lse.view()}};
  with_every_allocation_failing("merge", kOk, [&] { return encode(merge(parts, result.view())); });
  with_every_allocation_failing("merge: alias", StatusCode::invalid_argument,
                                [&] { return encode(merge(parts, out.view())); });
}

TEST_F(Allocation, Append) {
  Random random(3);
  const Tensor rows = draw_normal(random, DType::f32, {2, 2, 3, 8});
  const Tensor k(DType::f32, {4, 5, 2, 8}), v(DType::f32, {4, 5, 2, 8});
  const Tensor used = ints({1, 4}), bad = ints({1, 9});
  const Tensor table = tensor_of(DType::i32, {2, 2}, {3, 0, 2, 1});
  AppendTensors t{.k_new = rows.view(),
                  .v_new = rows.view(),
                  .k = k.view(),
                  .v = v.view(),
                  .seqused_k = used.view(),
                  .block_table = table.view()};
  with_every_allocation_failing("append", kOk, [&] { return encode(append(t)); });
  t.seqused_k = bad.view();
  with_every_allocation_failing("append: past the capacity", StatusCode::invalid_argument,
                                [&] { return encode(append(t)); });
  t.v = t.k;
  with_every_allocation_failing("append: alias", StatusCode::invalid_argument,
                                [&] { return encode(append(t)); });
}

TEST_F(Allocation, ThroughC) {
  CCall c(tensors_, inputs_.options);
  c.params.workspace = workspace_.get().data;
  c.params.workspace_bytes = workspace_.get().bytes;
  flashcore_error error;
  const auto as_code = [](std::int32_t code) { return static_cast<StatusCode>(code); };
  with_every_allocation_failing("flashcore_attention", kOk,
                                [&] { return as_code(flashcore_attention(&c.params, &error)); });
  flashcore_plan_info info{};
  info.struct_size = sizeof info;
  with_every_allocation_failing("flashcore_plan", kOk,
                                [&] { return as_code(flashcore_plan(&c.params, &info, &error)); });
  char text[4096];
  with_every_allocation_failing("flashcore_explain", kOk, [&] {
    return as_code(flashcore_explain(&c.params, text, sizeof text, nullptr, &error));
  });
  const flashcore_device cpu = {FLASHCORE_CPU, 0};
  with_every_allocation_failing("flashcore_workspace_init", kOk, [&] {
    return as_code(flashcore_workspace_init(c.params.workspace, 1 << 20, cpu, nullptr, &error));
  });
  with_every_allocation_failing("flashcore_workspace_init: device", StatusCode::unsupported, [&] {
    return as_code(flashcore_workspace_init(c.params.workspace, 1 << 20, {9, 9}, nullptr, &error));
  });
  with_every_allocation_failing(
      "flashcore_workspace_status: small", StatusCode::invalid_argument, [&] {
        return as_code(flashcore_workspace_status(c.params.workspace, 1, cpu, nullptr, &error));
      });
  with_every_allocation_failing("flashcore_cuda_device_count", kOk, [&] {
    return flashcore_cuda_device_count(&error) >= 0 ? kOk : StatusCode::internal;
  });
  c.params.kernel = "fwd_of_dreams_that_are_long_enough_to_need_memory";
  with_every_allocation_failing("flashcore_attention: kernel", StatusCode::invalid_argument, [&] {
    const std::int32_t code = flashcore_attention(&c.params, &error);
    // The message is terminated even if it could not be allocated.
    return std::strlen(error.message) > 0 ? as_code(code) : StatusCode::internal;
  });
  c.params.kernel = nullptr;
  c.params.struct_size = 3;
  with_every_allocation_failing("flashcore_attention: struct_size", StatusCode::invalid_argument,
                                [&] { return as_code(flashcore_attention(&c.params, &error)); });
  Tensor result(DType::f32, output_.out.shape());
  const CTensor part_out(want_.out.view()), part_lse(want_.lse.view()), out(result.view());
  flashcore_merge_params merge_params = {sizeof merge_params,
                                         &part_out.tensor,
                                         &part_lse.tensor,
                                         1,
                                         &out.tensor,
                                         nullptr,
                                         nullptr,
                                         nullptr,
                                         nullptr};
  with_every_allocation_failing("flashcore_merge", kOk,
                                [&] { return as_code(flashcore_merge(&merge_params, &error)); });
  merge_params.out = &part_out.tensor;
  with_every_allocation_failing("flashcore_merge: alias", StatusCode::invalid_argument,
                                [&] { return as_code(flashcore_merge(&merge_params, &error)); });
}

// The first call of a process detects the CPU and starts the threads. It runs in its own process,
// with allocation n failing.
enum FirstCall : int { kCorrect = 0, kWrong = 1, kNoFailure = 3 };

int first_call(long n, Failing failing) {
  Random random(1);
  const Inputs inputs = draw_inputs(random, *find_kernel("fwd_generic_f32"),
                                    {.batch = 2,
                                     .q_heads = 4,
                                     .kv_heads = 2,
                                     .q_len = 40,
                                     .kv_len = 200,
                                     .head_dim = 16,
                                     .v_dim = 16});
  const Output output = make_output(inputs);
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  CCall c(tensors, inputs.options);
  WorkspaceMemory workspace(16 << 20);
  c.params.workspace = workspace.get().data;
  c.params.workspace_bytes = workspace.get().bytes;
  c.params.threads = 4;
  fail_allocation(n, failing);
  const std::int32_t code = flashcore_attention(&c.params, nullptr);
  const bool failed = stop_failing();
  if (code != FLASHCORE_OK && code != FLASHCORE_OUT_OF_MEMORY) return kWrong;
  if (flashcore_attention(&c.params, nullptr) != FLASHCORE_OK) return kWrong;
  Output correct = attend(inputs);
  if (!difference(correct.out, output.out).empty() || !verdict(inputs, correct).empty())
    return kWrong;
  return failed ? kCorrect : kNoFailure;
}

TEST(FirstCallOfAProcess, SurvivesEveryFailedAllocation) {
  for (const char* failing : {"once", "on"}) {
    int status = kCorrect;
    long n = 0;
    for (; status == kCorrect; n += FLASHCORE_TEST_DIVISOR) {
      ASSERT_LT(n, kMaxAllocations);
      const std::string option = "--first-call=" + std::to_string(n) + "," + failing;
      const char* arguments[] = {"flashcore_allocation_tests", option.c_str(), nullptr};
      pid_t child = 0;
      ASSERT_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr,
                            const_cast<char* const*>(arguments), environ),
                0);
      int waited = 0;
      ASSERT_EQ(waitpid(child, &waited, 0), child);
      ASSERT_TRUE(WIFEXITED(waited)) << "allocation " << n << " ended the process";
      status = WEXITSTATUS(waited);
    }
    EXPECT_EQ(status, kNoFailure) << "at allocation " << n - FLASHCORE_TEST_DIVISOR;
    EXPECT_GT(n, 0);
  }
}

}  // namespace

/// --first-call=<n>,<once|on> makes one call and exits.
int main_of_first_call(const char* text) {
  char* rest = nullptr;
  const long n = std::strtol(text, &rest, 10);
  return first_call(n, std::strcmp(rest, ",once") == 0 ? Failing::once : Failing::from_then_on);
}

}  // namespace flashcore::test

int main(int argc, char** argv) {
  constexpr const char* kOption = "--first-call=";
  if (argc == 2 && std::strncmp(argv[1], kOption, std::strlen(kOption)) == 0) {
    return flashcore::test::main_of_first_call(argv[1] + std::strlen(kOption));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
