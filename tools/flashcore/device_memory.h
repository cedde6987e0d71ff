// Device memory that its destructor releases.
#pragma once

#include <cstddef>
#include <utility>

#include "backend/backend.h"
#include "command_error.h"

namespace flashcore::tool {

class DeviceMemory {
 public:
  DeviceMemory(const Backend& backend, Device device, std::size_t bytes)
      : backend_(backend),
        device_(device),
        data_(value_or_throw(backend.allocate(bytes, device.index))) {}
  ~DeviceMemory() { backend_.release(data_, device_.index); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  const Backend& backend_;
  Device device_;
  void* data_;
};

}  // namespace flashcore::tool
