// Global memory of the emulated device: allocations of the host process, so that copies are plain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace flashcore::emulator {

/// A range of valid addresses.
struct Range {
  std::uintptr_t first = 0, end = 0;
  bool holds(std::uintptr_t address, std::size_t bytes) const {
    return address >= first && address + bytes <= end;
  }
};

class DeviceMemory {
 public:
  /// Poisoned with 0xFF, which is NaN in every float format. Null if there is no memory.
  void* allocate(std::size_t bytes);
  /// False if the address is not that of an allocation.
  bool release(void* data);
  /// The allocation that holds the address, or an empty range.
  Range find(std::uintptr_t address) const;
  std::size_t bytes_in_use() const { return in_use_; }
  /// Changes with every allocation and release: cached ranges of another generation are stale.
  std::uint64_t generation() const { return generation_; }

 private:
  mutable std::recursive_mutex mutex_;
  std::map<std::uintptr_t, std::size_t> sizes_;
  std::size_t in_use_ = 0;
  std::uint64_t generation_ = 1;
};

DeviceMemory& device_memory();

}  // namespace flashcore::emulator
