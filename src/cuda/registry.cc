#include "cuda/registry.h"

#include <array>
#include <cstring>

#include "flashcore/plan.h"

namespace flashcore::cuda {

// One function per compiled kernel. The generated instantiation files define them.
#define FLASHCORE_COMPILED(name) const void* entry_##name(KernelEntry entry);
#include "generated/compiled_kernels.inc"
#undef FLASHCORE_COMPILED

namespace {

constexpr std::size_t kMaxKernels = 256;

using Entries = std::array<const void*, kMaxKernels>;

Entries entries([[maybe_unused]] KernelEntry entry) {
  Entries table{};
  for (std::size_t i = 0; i < kernels().size(); ++i) {
#define FLASHCORE_COMPILED(name) \
  if (std::strcmp(kernels()[i].id, #name) == 0) table[i] = entry_##name(entry);
#include "generated/compiled_kernels.inc"
#undef FLASHCORE_COMPILED
  }
  return table;
}

}  // namespace

const void* entry_of(const KernelInfo& kernel, KernelEntry entry) noexcept {
  static const auto tables = [] {
    std::array<Entries, kKernelEntries> made;
    for (int i = 0; i < kKernelEntries; ++i) {
      made[static_cast<std::size_t>(i)] = entries(static_cast<KernelEntry>(i));
    }
    return made;
  }();
  return tables[static_cast<std::size_t>(entry)]
               [static_cast<std::size_t>(&kernel - kernels().data())];
}

}  // namespace flashcore::cuda
