// Concurrent calls on several streams, from several host threads, under load. The bits equal those
// of an idle GPU.
#include <atomic>
#include <memory>
#include <thread>

#include "gpu/support.h"

namespace flashcore::gpu_test {
namespace {

class Streams : public GpuTest {};

/// Different kernels, with and without splits. None fills the GPU, so they run concurrently.
std::vector<verify::CaseSpec> mixed_cases() {
  std::vector<verify::CaseSpec> specs;
  specs.push_back(dense(DType::f16, 1, 8, 8, 512, 512, 64));
  specs.push_back(dense(DType::bf16, 2, 8, 2, 1, 3000, 128));
  specs.push_back(dense(DType::f32, 1, 4, 4, 130, 900, 80));
  specs.push_back(dense(DType::f16, 1, 2, 1, 65, 257, 256));
  specs[0].options.causal = true;
  specs[2].options.num_splits = 4;
  specs[3].options.softcap = 20;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].lse = true;
    specs[i].seed = 100 + i;
  }
  return specs;
}

/// A case, its memory and its result on an idle GPU.
struct Known {
  explicit Known(const verify::CaseSpec& spec)
      : memory(spec), gpu(memory), want(gpu.direct(memory, nullptr)) {}
  verify::CaseMemory memory;
  GpuCase gpu;
  std::vector<std::byte> want;
};

TEST_F(Streams, TwoConcurrentStreamsEqualSerialResults) {
  const std::vector<verify::CaseSpec> specs = mixed_cases();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    Known a(specs[i]), b(specs[(i + 1) % specs.size()]);
    expect_right(a.memory, a.want, a.gpu.plan());
    const TestStream stream_a, stream_b;
    for (int repeat = 0; repeat < 5; ++repeat) {
      a.gpu.load(a.memory);
      b.gpu.load(b.memory);
      for (int call = 0; call < 20; ++call) {
        require(a.gpu.run(stream_a));
        require(b.gpu.run(stream_b));
      }
      ASSERT_EQ(a.gpu.block(), a.want) << to_string(specs[i]);
      ASSERT_EQ(b.gpu.block(), b.want) << to_string(b.memory.spec());
    }
    EXPECT_TRUE(a.gpu.workspace().header_is_zero());
    EXPECT_TRUE(b.gpu.workspace().header_is_zero());
  }
}

TEST_F(Streams, BitsDoNotDependOnTheStream) {
  int least = 0, greatest = 0;
  require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
  const TestStream low(least), high(greatest), load_stream;
  Known load(dense(DType::f32, 4, 8, 8, 512, 512, 64));
  for (const verify::CaseSpec& spec : mixed_cases()) {
    Known known(spec);
    const Stream streams[] = {nullptr, cudaStreamLegacy, cudaStreamPerThread,
                              static_cast<cudaStream_t>(low), static_cast<cudaStream_t>(high)};
    for (const bool busy : {false, true}) {
      for (const Stream stream : streams) {
        known.gpu.load(known.memory);
        for (int i = 0; busy && i < 4; ++i) require(load.gpu.run(load_stream));
        require(known.gpu.run(stream));
        ASSERT_EQ(known.gpu.block(), known.want) << to_string(spec) << " busy " << busy;
      }
    }
  }
  EXPECT_EQ(load.gpu.block(), load.want);
}

TEST_F(Streams, SeveralHostThreadsGiveTheSameBits) {
  const std::vector<verify::CaseSpec> specs = mixed_cases();
  std::vector<std::unique_ptr<Known>> known;
  for (int i = 0; i < 8; ++i) {
    verify::CaseSpec spec = specs[static_cast<std::size_t>(i) % specs.size()];
    spec.seed += static_cast<std::uint64_t>(i);
    known.push_back(std::make_unique<Known>(spec));
    known.back()->gpu.load(known.back()->memory);
  }
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (const auto& one : known) {
    threads.emplace_back([&failures, &one] {
      try {
        const TestStream stream;
        for (int call = 0; call < 100; ++call) {
          // Every thread also plans, as a caller would.
          const Plan plan = plan_for(one->gpu.tensors(), one->memory.spec().options);
          require(run(plan, one->gpu.tensors(), one->gpu.workspace().get(), stream));
        }
        require(workspace_status(one->gpu.workspace().get(), stream));
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  for (const auto& one : known) EXPECT_EQ(one->gpu.block(), one->want);
}

}  // namespace
}  // namespace flashcore::gpu_test
