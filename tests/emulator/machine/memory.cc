#include "emulator/machine/memory.h"

#include <sys/mman.h>

#include <cstring>

namespace flashcore::emulator {
namespace {

constexpr std::size_t kPage = 4096;
/// Poisoning more than this would take the memory of the machine for tests with huge strides.
constexpr std::size_t kMaxPoison = std::size_t{256} << 20;

std::size_t mapped_bytes(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage + kPage; }

}  // namespace

void* DeviceMemory::allocate(std::size_t bytes) {
  const std::size_t mapped = mapped_bytes(bytes);
  // The last page stays inaccessible: host copies past the end fault too.
  void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  mprotect(static_cast<char*>(data) + mapped - kPage, kPage, PROT_NONE);
  if (bytes <= kMaxPoison) std::memset(data, 0xff, bytes);
  const std::lock_guard lock(mutex_);
  sizes_[reinterpret_cast<std::uintptr_t>(data)] = bytes;
  in_use_ += bytes;
  ++generation_;
  return data;
}

bool DeviceMemory::release(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = sizes_.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == sizes_.end()) return false;
  munmap(data, mapped_bytes(found->second));
  in_use_ -= found->second;
  sizes_.erase(found);
  ++generation_;
  return true;
}

Range DeviceMemory::find(std::uintptr_t address) const {
  const std::lock_guard lock(mutex_);
  auto above = sizes_.upper_bound(address);
  if (above == sizes_.begin()) return {};
  --above;
  if (address >= above->first + above->second) return {};
  return {above->first, above->first + above->second};
}

DeviceMemory& device_memory() {
  static DeviceMemory memory;
  return memory;
}

}  // namespace flashcore::emulator
