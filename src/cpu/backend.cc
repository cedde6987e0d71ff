// The CPU backend. A launch is a loop over work tiles on the thread pool.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "backend/backend.h"
#include "core/append.h"
#include "core/combine.h"
#include "core/error.h"
#include "core/params.h"
#include "core/quantize.h"
#include "core/scratch.h"
#include "core/seq_info.h"
#include "cpu/append.h"
#include "cpu/backward.h"
#include "cpu/combine.h"
#include "cpu/cpu_info.h"
#include "cpu/kernel_table.h"
#include "cpu/quantize.h"
#include "cpu/thread_pool.h"

namespace flashcore {
namespace {

// Below this amount of arithmetic, waking other threads costs more time than it saves.
constexpr double kInlineFlops = 2e5;

constexpr std::size_t kAlignment = 256;

cpu::TileFunction tile_function(const KernelInfo& kernel) noexcept {
  const cpu::IsaKernels* kernels = cpu::isa_kernels(kernel.isa);
  if (kernels == nullptr || !cpu::isa_available(kernel.isa)) return nullptr;
  const bool rows = kernel.tile_q <= core::kGemvRows;
  switch (kernel.dtype) {
    case DType::f64: return kernels->f64;
    case DType::f32: return rows ? kernels->f32_rows : kernels->f32;
    case DType::f16: return rows ? kernels->f16_rows : kernels->f16;
    case DType::bf16: return rows ? kernels->bf16_rows : kernels->bf16;
    default: return nullptr;
  }
}

class CpuBackend final : public Backend {
 public:
  Status launch(const Plan& plan, const core::AttentionParams& params, Stream,
                const std::int32_t* cancel) const override {
    struct Job {
      cpu::TileFunction function;
      const core::AttentionParams* params;
      char* scratch;
      std::size_t scratch_stride;
      const std::int32_t* cancel;
    } job{tile_function(*plan.kernel), &params,
          reinterpret_cast<char*>(params.error) + plan.scratch_offset,
          plan.scratch_bytes_per_thread, cancel};
    if (job.function == nullptr) {
      return Status(StatusCode::unsupported,
                    std::string("kernel ") + plan.kernel->id + ": this CPU cannot execute it");
    }
    // Lengths, starts and page ids are in host memory: check all of them before any write.
    for (std::int32_t b = 0; b < params.batch; ++b) {
      const core::SeqInfo sequence = core::seq_info_of(params, b);
      core::ErrorSlot found = sequence.error;
      const std::int32_t slots = core::slots_in_use(params.pages, sequence.kv_len);
      for (std::int32_t slot = 0; slot < slots && found.code == 0; ++slot) {
        found = core::page_error(params.pages, b, slot);
      }
      if (found.code == 0) continue;
      if (params.checked) *params.error = found;
      return describe_error(found);
    }
    const int threads = cost(plan.problem).flops < kInlineFlops ? 1 : plan.device.threads;
    cpu::parallel_for(
        threads, params.num_tiles,
        [](void* context, std::int64_t index, int slot) {
          const Job& j = *static_cast<const Job*>(context);
          j.function(*j.params, index,
                     j.scratch + static_cast<std::size_t>(slot) * j.scratch_stride, j.cancel);
        },
        &job, cancel);
    return check_cancel(cancel);
  }

  Status launch_backward(const BackwardPlan& plan, const core::BackwardParams& params, Stream,
                         const std::int32_t* cancel) const override {
    return cpu::run_backward(plan, params, cancel);
  }

  Status combine(const core::CombineParams& params, DType partials, Device, int threads, Stream,
                 const std::int32_t* cancel) const override {
    const double flops =
        2.0 * params.batch * params.q_heads * params.rows * params.v_dim * params.parts;
    if (threads == 0) threads = device_info(0)->threads;
    cpu::combine(params, partials, flops < kInlineFlops ? 1 : threads, cancel);
    return check_cancel(cancel);
  }

  Status append(const core::AppendParams& params, Device, Stream,
                const std::int32_t* cancel) const override {
    const core::ErrorSlot found = cpu::append(params, cancel);
    if (found.code != 0 && params.error != nullptr) *params.error = found;
    FLASHCORE_RETURN_IF_ERROR(describe_error(found));
    return check_cancel(cancel);
  }

  Status quantize(const core::QuantParams& params, Device, Stream,
                  const std::int32_t* cancel) const override {
    return cpu::quantize(params, threads_for(params), cancel);
  }
  Status dequantize(const core::QuantParams& params, Device, Stream,
                    const std::int32_t* cancel) const override {
    cpu::dequantize(params, threads_for(params), cancel);
    return check_cancel(cancel);
  }

  Status zero(void* data, std::size_t bytes, Device, Stream) const override {
    std::memset(data, 0, bytes);
    return {};
  }

  Status copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                   std::size_t width, std::size_t rows, Device, Stream) const override {
    for (std::size_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                  static_cast<const std::byte*>(from) + row * from_pitch, width);
    }
    return {};
  }

  Status read_error(const core::ErrorSlot* slot, core::ErrorSlot* host, Device,
                    Stream) const override {
    *host = *slot;
    return {};
  }

  Result<DeviceInfo> device_info(int) const override {
    static const DeviceInfo info = cpu::query_cpu();  // reads files, so only once
    return info;
  }

  Status measure_rates(DeviceInfo& info) const override { return cpu::measure_rates(info); }

  Result<KernelResources> resources(const KernelInfo&, int) const override {
    return Status(StatusCode::unsupported,
                  "CPU kernels have no registers or shared memory to report");
  }

  Status launch_empty(Device, Stream) const override { return {}; }

  Result<void*> allocate(std::size_t bytes, int) const override {
    void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (data == nullptr && bytes > 0) return Status(StatusCode::out_of_memory, "out of memory");
    return data;
  }
  void release(void* data, int) const override { std::free(data); }
  Status upload(void* to, const void* from_host, std::size_t bytes, int) const override {
    if (bytes > 0) std::memcpy(to, from_host, bytes);
    return {};
  }
  Status download(void* to_host, const void* from, std::size_t bytes, int) const override {
    if (bytes > 0) std::memcpy(to_host, from, bytes);
    return {};
  }

  Result<std::vector<double>> time(const std::function<Status(int, Stream)>& call, int calls,
                                   int samples, int) const override {
    std::vector<double> microseconds;
    for (int sample = 0; sample < samples; ++sample) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) {
        if (Status status = call(i, nullptr); !status.ok()) return status;
      }
      const std::chrono::duration<double, std::micro> elapsed =
          std::chrono::steady_clock::now() - start;
      microseconds.push_back(elapsed.count() / calls);
    }
    return microseconds;
  }

 private:
  int threads_for(const core::QuantParams& p) const {
    const double elements = static_cast<double>(p.batch) * p.heads * p.rows * p.columns;
    return elements * 8 < kInlineFlops ? 1 : device_info(0)->threads;
  }
};

}  // namespace

const Backend& cpu_backend() noexcept {
  static const CpuBackend backend;
  return backend;
}

}  // namespace flashcore
