#include "cuda/registry.h"

#include <array>
#include <cstring>

#include "flashcore/plan.h"

namespace flashcore::cuda {

// One function per compiled kernel. The generated instantiation files define them.
#define FLASHCORE_COMPILED(name) const void* entry_##name();
#include "generated/compiled_kernels.inc"
#undef FLASHCORE_COMPILED

namespace {

constexpr std::size_t kMaxKernels = 256;

std::array<const void*, kMaxKernels> entries() {
  std::array<const void*, kMaxKernels> table{};
  for (std::size_t i = 0; i < kernels().size(); ++i) {
#define FLASHCORE_COMPILED(name) \
  if (std::strcmp(kernels()[i].id, #name) == 0) table[i] = entry_##name();
#include "generated/compiled_kernels.inc"
#undef FLASHCORE_COMPILED
  }
  return table;
}

}  // namespace

const void* entry_of(const KernelInfo& kernel) noexcept {
  static const std::array<const void*, kMaxKernels> table = entries();
  return table[static_cast<std::size_t>(&kernel - kernels().data())];
}

}  // namespace flashcore::cuda
