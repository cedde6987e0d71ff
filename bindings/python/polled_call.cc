#include "bindings/python/polled_call.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "flashcore/plan.h"

namespace flashcore::python {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(10);
constexpr std::size_t kWorkspaceAlignment = 256;
constexpr double kLongFlopsPerThread = 1e9;  // about 20 ms
constexpr double kLongBytes = 16 << 20;      // about 20 ms on one thread, without GEMMs
constexpr std::int32_t kMaxRank = 4;
constexpr std::int32_t kPinnedHost = 3;  // kDLCUDAHost

struct Free {
  void operator()(void* memory) const noexcept { std::free(memory); }
};

std::int32_t failure(std::int32_t code, const char* message, flashcore_error* error) noexcept {
  if (error != nullptr) {
    error->code = code;
    std::strncpy(error->message, message, sizeof error->message - 1);
    error->message[sizeof error->message - 1] = '\0';
  }
  return code;
}

/// A call on its own thread. (std::async would add symbols to the library's exports.)
class RunningCall {
 public:
  /// Throws std::system_error if no thread can be started.
  explicit RunningCall(const PolledCall& call)
      : thread_([this, &call] {
          const std::int32_t code = call(&cancel_, &error_);
          const std::lock_guard lock(mutex_);
          code_ = code;
          is_done_ = true;
          done_.notify_one();
        }) {}
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;
  /// Waits for the call.
  ~RunningCall() { thread_.join(); }

  bool ends_within(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return done_.wait_for(lock, time, [this] { return is_done_; });
  }
  void cancel() { __atomic_store_n(&cancel_, 1, __ATOMIC_RELAXED); }
  /// Requires that the call has ended.
  std::int32_t result(flashcore_error* error) const {
    if (error != nullptr) *error = error_;
    return code_;
  }

 private:
  std::int32_t cancel_ = 0;
  flashcore_error error_{};
  std::mutex mutex_;  // guards is_done_ and code_
  std::condition_variable done_;
  bool is_done_ = false;
  std::int32_t code_ = 0;
  std::thread thread_;  // the last member: the thread uses the others
};

std::int32_t run_on_thread(const PolledCall& call, const Stop& stop, flashcore_error* error) {
  RunningCall running(call);
  while (!running.ends_within(kPollInterval)) {
    if (!stop()) continue;
    running.cancel();
    // The result is "cancelled" even if the call completes: the caller asked it to stop.
    return failure(FLASHCORE_CANCELLED, "cancel: the flag was set", error);
  }
  return running.result(error);
}

bool is_described(const flashcore_tensor* t) noexcept {
  return t != nullptr && t->ndim >= 1 && t->ndim <= kMaxRank && t->shape != nullptr;
}

double elements_of(const flashcore_tensor& t) noexcept {
  double count = 1;
  for (std::int32_t i = 0; i < t.ndim; ++i) count *= static_cast<double>(t.shape[i]);
  return count;
}

double bytes_of(const flashcore_tensor* t) noexcept {
  return is_described(t) ? elements_of(*t) * t->dtype.bits / 8 : 0;
}

double last_extent(const flashcore_tensor& t) noexcept {
  return static_cast<double>(t.shape[t.ndim - 1]);
}

/// Capacity of a sequence in keys.
double keys_of(const flashcore_params& p) noexcept {
  const flashcore_tensor& k = *p.k;
  if (is_described(p.block_table) && k.ndim == 4) {
    return last_extent(*p.block_table) * static_cast<double>(k.shape[1]);
  }
  if (p.cu_seqlens_k != nullptr) {
    return static_cast<double>(p.max_kv_len > 0 ? std::min(p.max_kv_len, k.shape[0]) : k.shape[0]);
  }
  return k.ndim == 4 ? static_cast<double>(k.shape[p.layout == 1 ? 1 : 2]) : 0;
}

/// True for a CPU call that reads and writes many bytes. `tensor`: one that has the call's device.
bool moves_many_bytes(const flashcore_tensor* tensor, double bytes) noexcept {
  return is_described(tensor) && is_cpu(tensor->device) && bytes > kLongBytes;
}

}  // namespace

std::int32_t run_polled(const PolledCall& call, const Stop& stop, flashcore_error* error) noexcept {
  try {
    return run_on_thread(call, stop, error);
  } catch (const std::system_error&) {  // no thread
    return call(nullptr, error);
  }
}

namespace {

/// Gives `call` a new workspace of `bytes` bytes, then runs `function` with it.
template <typename Function>
std::int32_t run_with_workspace(flashcore_params& call, std::size_t bytes, const Stop& stop,
                                flashcore_error* error, Function function) noexcept {
  const std::size_t blocks = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment;
  const std::unique_ptr<void, Free> memory(
      std::aligned_alloc(kWorkspaceAlignment, blocks * kWorkspaceAlignment));
  if (memory == nullptr) return failure(FLASHCORE_OUT_OF_MEMORY, "out of memory", error);
  call.workspace = memory.get();
  call.workspace_bytes = bytes;
  call.workspace_header = nullptr;
  if (const std::int32_t code = flashcore_workspace_init(call.workspace, call.workspace_bytes,
                                                         {FLASHCORE_CPU, 0}, nullptr, error);
      code != FLASHCORE_OK) {
    return code;
  }
  const auto cancellable = [&](const std::int32_t* cancel, flashcore_error* failed) {
    call.cancel = cancel;
    return function(failed);
  };
  return run_polled(cancellable, stop, error);
}

}  // namespace

std::int32_t run_attention_polled(const flashcore_params& params, const Stop& stop,
                                  flashcore_error* error) noexcept {
  flashcore_params own = params;
  flashcore_plan_info plan{};
  plan.struct_size = sizeof plan;
  if (const std::int32_t code = flashcore_plan(&own, &plan, error); code != FLASHCORE_OK) {
    return code;
  }
  return run_with_workspace(
      own, plan.workspace_bytes, stop, error,
      [&own](flashcore_error* failed) { return flashcore_attention(&own, failed); });
}

std::int32_t run_backward_polled(const flashcore_backward_params& params, const Stop& stop,
                                 flashcore_error* error) noexcept {
  flashcore_params call = *params.call;  // is_long() has checked it
  flashcore_backward_params own = params;
  own.call = &call;
  flashcore_plan_info plan{};
  plan.struct_size = sizeof plan;
  if (const std::int32_t code = flashcore_backward_plan(&own, &plan, error); code != FLASHCORE_OK) {
    return code;
  }
  return run_with_workspace(
      call, plan.workspace_bytes, stop, error,
      [&own](flashcore_error* failed) { return flashcore_attention_backward(&own, failed); });
}

bool is_cpu(const flashcore_device& device) noexcept {
  return device.device_type == FLASHCORE_CPU || device.device_type == kPinnedHost;
}

bool is_long(const flashcore_params& p) noexcept {
  if (!is_described(p.q) || !is_described(p.k) || !is_described(p.v) || !is_cpu(p.q->device)) {
    return false;
  }
  // Two multiply-adds per (query, key, column): Q K^T and P V.
  const double rows = elements_of(*p.q) / std::max(last_extent(*p.q), 1.0);
  const double flops = 2 * rows * keys_of(p) * (last_extent(*p.q) + last_extent(*p.v));
  if (flops <= kLongFlopsPerThread) return false;
  const Result<DeviceInfo> cpu = device_info(Device{});
  const std::int32_t threads = p.threads > 0 ? p.threads : cpu.ok() ? cpu->threads : 1;
  return flops > kLongFlopsPerThread * threads;
}

bool is_long(const flashcore_backward_params& p) noexcept {
  return p.call != nullptr && p.call->struct_size == sizeof *p.call && is_long(*p.call);
}

bool is_long(const flashcore_merge_params& p) noexcept {
  return moves_many_bytes(p.out, bytes_of(p.out) * static_cast<double>(p.parts + 1));
}

bool is_long(const flashcore_append_params& p) noexcept {
  return moves_many_bytes(p.k, bytes_of(p.k_new) + bytes_of(p.v_new));
}

bool is_long(const flashcore_quant_params& p) noexcept {
  return moves_many_bytes(p.from, bytes_of(p.from) + bytes_of(p.to));
}

}  // namespace flashcore::python
