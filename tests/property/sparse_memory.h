// Address space without memory: the system allocates a page when it is written.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

namespace flashcore::test {

class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    // A raw system call, because the mmap of a sanitizer touches shadow memory for every byte.
    const long result = syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = result == -1 ? nullptr : reinterpret_cast<std::byte*>(result);
  }
  ~SparseMemory() {
    if (data_ != nullptr) syscall(SYS_munmap, data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  /// Null if the system refuses that much address space.
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace flashcore::test
