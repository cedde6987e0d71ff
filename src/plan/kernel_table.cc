// All kernels there are, from the two lists, whether or not this build or machine can run them.
#include <array>
#include <cstring>
#include <string_view>

#include "core/sm80_traits.h"
#include "flashcore/plan.h"
#include "plan/planner.h"

namespace flashcore {
namespace {

constexpr std::string_view kCompiledCudaKernels[] = {
    "",  // a build without CUDA leaves the list empty
#define FLASHCORE_COMPILED(id) #id,
#include "generated/compiled_kernels.inc"
#undef FLASHCORE_COMPILED
};

constexpr bool compiled_for_cuda(std::string_view id) {
  for (const std::string_view compiled : kCompiledCudaKernels) {
    if (compiled == id) return true;
  }
  return false;
}

constexpr bool compiled_for_cpu(Isa isa) {
#if defined(__aarch64__)
  return isa == Isa::generic || isa == Isa::neon;
#elif defined(__x86_64__)
  return isa == Isa::generic || isa == Isa::avx2 || isa == Isa::avx512;
#else
  return isa == Isa::generic;
#endif
}

constexpr int kMaxCpuHeadDim = 576;
constexpr int kCpuTileQ = 64;  // rows of one work item: a multiple of every panel

/// Work items of simt and Hopper kernels belong to one query head.
constexpr bool packs_heads(std::string_view family) {
  return family == "sm80" || family == "sm80_8bit";
}

constexpr int min_compute_capability(std::string_view family) {
  return family == "simt" ? 75 : packs_heads(family) ? 80 : 90;
}

/// Tensor cores take P in the format they multiply in.
constexpr DType probability_dtype(std::string_view family, DType dtype) {
  return family == "simt"        ? DType::f32
         : family == "sm90_e4m3" ? DType::e4m3
         : family == "sm80_8bit" ? DType::f16
                                 : dtype;
}

constexpr bool uses_tma(std::string_view family) { return family.substr(0, 4) == "sm90"; }

constexpr std::int32_t blocks_per_sm(std::string_view family, int head_dim, int tile_q, int tile_k,
                                     int stages, int warp_rows, int threads) {
  if (family == "simt") return 2;
  if (uses_tma(family)) return 1;
  const int key_bytes = family == "sm80_8bit" ? 1 : 2;
  return core::Sm80Traits{head_dim, tile_q, tile_k, stages, warp_rows, threads, key_bytes}
      .blocks_per_sm();
}

constexpr KernelInfo kKernels[] = {
#define FLASHCORE_KERNEL(id, family, dtype, head_dim, tile_q, tile_k, stages, warp_rows, threads, \
                         smem)                                                                    \
  {#id,                                                                                           \
   #family,                                                                                       \
   DeviceType::cuda,                                                                              \
   DType::dtype,                                                                                  \
   probability_dtype(#family, DType::dtype),                                                      \
   Isa::generic,                                                                                  \
   min_compute_capability(#family),                                                               \
   head_dim,                                                                                      \
   tile_q,                                                                                        \
   tile_k,                                                                                        \
   threads,                                                                                       \
   smem,                                                                                          \
   blocks_per_sm(#family, head_dim, tile_q, tile_k, stages, warp_rows, threads),                  \
   packs_heads(#family),                                                                          \
   uses_tma(#family),                                                                             \
   compiled_for_cuda(#id)},
#include "cuda/kernels.def"
#undef FLASHCORE_KERNEL
#define FLASHCORE_CPU_KERNEL(isa, dtype)                 \
  {"fwd_" #isa "_" #dtype,                               \
   "cpu",                                                \
   DeviceType::cpu,                                      \
   DType::dtype,                                         \
   DType::dtype == DType::f64 ? DType::f64 : DType::f32, \
   Isa::isa,                                             \
   0,                                                    \
   kMaxCpuHeadDim,                                       \
   kCpuTileQ,                                            \
   0,                                                    \
   0,                                                    \
   0,                                                    \
   0,                                                    \
   true,                                                 \
   false,                                                \
   compiled_for_cpu(Isa::isa)},
#include "cpu/kernels.def"
#undef FLASHCORE_CPU_KERNEL
};

/// The lists have the kernels of a family and dtype in one piece; where such a piece that begins
/// here ends.
constexpr auto kEndsOfGroups = [] {
  std::array<std::uint8_t, std::size(kKernels)> ends{};
  std::size_t end = std::size(kKernels);
  for (std::size_t i = std::size(kKernels); i-- > 0;) {
    const bool last = i + 1 == std::size(kKernels) || kKernels[i].dtype != kKernels[i + 1].dtype ||
                      std::string_view(kKernels[i].family) != kKernels[i + 1].family;
    if (last) end = i + 1;
    ends[i] = static_cast<std::uint8_t>(end);
  }
  return ends;
}();
static_assert(std::size(kKernels) < 256);

std::size_t end_of_group(std::size_t begin) { return kEndsOfGroups[begin]; }

}  // namespace

std::span<const KernelInfo> kernels() noexcept { return kKernels; }

std::span<const KernelInfo> kernels_of(const char* family, DType dtype) noexcept {
  for (std::size_t begin = 0; begin < std::size(kKernels); begin = end_of_group(begin)) {
    if (kKernels[begin].dtype != dtype || std::strcmp(kKernels[begin].family, family) != 0)
      continue;
    return std::span(kKernels).subspan(begin, end_of_group(begin) - begin);
  }
  return {};
}

const KernelInfo* find_kernel(const char* id) noexcept {
  if (id == nullptr) return nullptr;
  // fwd_plain_* is the name that 0.1 gave the kernels fwd_generic_*.
  constexpr std::string_view kOldPrefix = "fwd_plain_", kPrefix = "fwd_generic_";
  const std::string_view name = id;
  const bool old = name.starts_with(kOldPrefix);
  for (const KernelInfo& kernel : kKernels) {
    const std::string_view known = kernel.id;
    if (old ? known.starts_with(kPrefix) &&
                  known.substr(kPrefix.size()) == name.substr(kOldPrefix.size())
            : known == name) {
      return &kernel;
    }
  }
  return nullptr;
}

}  // namespace flashcore
