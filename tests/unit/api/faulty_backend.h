// The CPU backend with one injected fault, which a check must detect.
#pragma once

#include <cstddef>
#include <cstring>

#include "backend/backend.h"
#include "core/combine.h"

namespace flashcore::test {

struct Fault {
  /// Adds `add` to the float at `offset` in every download of exactly this many bytes.
  std::size_t block_bytes = 0, offset = 0;
  float add = 0;
  bool forget_sinks = false;  ///< combine() ignores the sinks
  /// Doubles the float at `offset` in every upload of at least this many bytes.
  std::size_t doubled_from_bytes = 0;
};

class FaultyBackend final : public Backend {
 public:
  explicit FaultyBackend(const Fault& fault) : fault_(fault) {}

  Status launch(const Plan& plan, const core::AttentionParams& params, Stream stream,
                const std::int32_t* cancel) const override {
    return real_.launch(plan, params, stream, cancel);
  }
  Status combine(const core::CombineParams& params, DType partials, Device device, int threads,
                 Stream stream, const std::int32_t* cancel) const override {
    core::CombineParams changed = params;
    if (fault_.forget_sinks) changed.sinks = nullptr;
    return real_.combine(changed, partials, device, threads, stream, cancel);
  }
  Status append(const core::AppendParams& params, Device device, Stream stream,
                const std::int32_t* cancel) const override {
    return real_.append(params, device, stream, cancel);
  }
  Status quantize(const core::QuantParams& params, Device device, Stream stream,
                  const std::int32_t* cancel) const override {
    return real_.quantize(params, device, stream, cancel);
  }
  Status dequantize(const core::QuantParams& params, Device device, Stream stream,
                    const std::int32_t* cancel) const override {
    return real_.dequantize(params, device, stream, cancel);
  }
  Status zero(void* data, std::size_t bytes, Device device, Stream stream) const override {
    return real_.zero(data, bytes, device, stream);
  }
  Status copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                   std::size_t width, std::size_t rows, Device device,
                   Stream stream) const override {
    return real_.copy_rows(to, to_pitch, from, from_pitch, width, rows, device, stream);
  }
  Status read_error(const core::ErrorSlot* slot, core::ErrorSlot* host, Device device,
                    Stream stream) const override {
    return real_.read_error(slot, host, device, stream);
  }
  Result<DeviceInfo> device_info(int index) const override { return real_.device_info(index); }
  Status measure_rates(DeviceInfo& info) const override { return real_.measure_rates(info); }
  Result<KernelResources> resources(const KernelInfo& kernel, int device) const override {
    return real_.resources(kernel, device);
  }
  Status launch_empty(Device device, Stream stream) const override {
    return real_.launch_empty(device, stream);
  }
  Result<void*> allocate(std::size_t bytes, int device) const override {
    return real_.allocate(bytes, device);
  }
  void release(void* data, int device) const override { real_.release(data, device); }
  Status upload(void* to, const void* from, std::size_t bytes, int device) const override {
    const Status status = real_.upload(to, from, bytes, device);
    if (fault_.doubled_from_bytes > 0 && bytes >= fault_.doubled_from_bytes) {
      float value;
      std::byte* address = static_cast<std::byte*>(to) + fault_.offset;
      std::memcpy(&value, address, sizeof value);
      value *= 2;
      std::memcpy(address, &value, sizeof value);
    }
    return status;
  }
  Status download(void* to, const void* from, std::size_t bytes, int device) const override {
    const Status status = real_.download(to, from, bytes, device);
    if (bytes == fault_.block_bytes) {
      float value;
      std::byte* address = static_cast<std::byte*>(to) + fault_.offset;
      std::memcpy(&value, address, sizeof value);
      value += fault_.add;
      std::memcpy(address, &value, sizeof value);
    }
    return status;
  }
  Result<std::vector<double>> time(const std::function<Status(int, Stream)>& call, int calls,
                                   int samples, int device) const override {
    return real_.time(call, calls, samples, device);
  }

 private:
  const Backend& real_ = cpu_backend();
  Fault fault_;
};

}  // namespace flashcore::test
