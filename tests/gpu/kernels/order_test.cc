// Programmatic dependent launch: a kernel may start while its predecessor in the stream still runs.
// It must not read data that the predecessor has yet to write.
#include "gpu/support.h"
#include "plan/planner.h"

namespace flashcore::gpu_test {
namespace {

class Order : public GpuTest {};

/// A chain of calls. Each writes the first or the last keys and values of the next call.
class Chain {
 public:
  explicit Chain(const verify::CaseSpec& spec) : memory_(spec), gpu_(memory_) {
    gpu_.load(memory_);
    const Tensors& t = gpu_.tensors();
    row_bytes_ = static_cast<std::size_t>(spec.head_dim * size_of(t.k.dtype));
    key_bytes_ = static_cast<std::size_t>(spec.kv_len) * row_bytes_;
    out_bytes_ = static_cast<std::size_t>(spec.q_heads * spec.q_len) * row_bytes_;
    keys_.resize(key_bytes_);
    require(cudaMemcpy(keys_.data(), t.k.data, key_bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

  /// Returns the keys of all calls.
  std::vector<std::byte> run(bool synchronize) const {
    const DeviceBuffer from(keys_), to((kCalls + 1) * key_bytes_);
    const TestStream stream;
    for (int i = 0; i <= kCalls; ++i) {
      require(cudaMemcpyAsync(to.data() + static_cast<std::size_t>(i) * key_bytes_, from.data(),
                              key_bytes_, cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
    }
    for (int i = 0; i < kCalls; ++i) {
      std::byte* keys = to.data() + static_cast<std::size_t>(i) * key_bytes_;
      Tensors t = gpu_.tensors();
      t.k.data = t.v.data = keys;
      t.out.data = keys + key_bytes_ + (i % 2 == 0 ? 0 : key_bytes_ - out_bytes_);
      require(flashcore::run(gpu_.plan(), t, gpu_.workspace().get(), stream));
      if (synchronize) stream.synchronize();
    }
    stream.synchronize();
    return to.download();
  }

  const Plan& plan() const { return gpu_.plan(); }

 private:
  static constexpr int kCalls = 8;
  verify::CaseMemory memory_;
  GpuCase gpu_;
  std::vector<std::byte> keys_;
  std::size_t row_bytes_, key_bytes_, out_bytes_;
};

TEST_F(Order, CallReadsTheOutputOfThePreviousCall) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    if (needs_8_bits(*kernel)) continue;  // their 16-bit output cannot be 8-bit keys
    for (const std::int64_t kv_len : {64, 4096}) {
      verify::CaseSpec spec = dense(*kernel, 1, 4, 1, 16, kv_len);
      spec.options.kernel = kernel->id;
      const Chain chain(spec);
      const std::vector<std::byte> want = chain.run(true);
      for (int repeat = 0; repeat < 5; ++repeat) {
        ASSERT_TRUE(chain.run(false) == want)
            << kernel->id << ", " << kv_len << " keys, " << chain.plan().splits << " splits";
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
