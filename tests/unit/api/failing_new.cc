#include "unit/api/failing_new.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace flashcore::test {
namespace {

constexpr long kNever = -1;

std::atomic<long> g_allowed{kNever};
std::atomic<bool> g_once{true};
std::atomic<bool> g_failed{false};

bool must_fail() {
  long left = g_allowed.load();
  while (left > 0) {
    if (g_allowed.compare_exchange_weak(left, left - 1)) return false;
  }
  if (left == kNever) return false;
  if (g_once.load()) g_allowed.store(kNever);
  g_failed.store(true);
  return true;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (must_fail()) return nullptr;
  if (bytes == 0) bytes = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void fail_allocation(long allowed, Failing failing) {
  g_once.store(failing == Failing::once);
  g_failed.store(false);
  g_allowed.store(allowed);
}

bool stop_failing() {
  g_allowed.store(kNever);
  return g_failed.exchange(false);
}

}  // namespace flashcore::test

namespace test = flashcore::test;

void* operator new(std::size_t bytes) { return test::allocate_or_throw(bytes, 0); }
void* operator new[](std::size_t bytes) { return test::allocate_or_throw(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return test::allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return test::allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return test::allocate(bytes, 0);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return test::allocate(bytes, 0);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
