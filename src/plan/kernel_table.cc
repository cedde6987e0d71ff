// All kernels of both kernels.def lists, including those that this build or machine cannot run.
#include <array>
#include <string_view>

#include "core/backward_traits.h"
#include "core/scratch.h"
#include "core/sm80_traits.h"
#include "plan/kernel_traits.h"
#include "plan/planner.h"

namespace flashcore {
namespace {

constexpr std::string_view kCompiledCudaKernels[] = {
    "",  // the list of a build without CUDA is empty
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
  return isa != Isa::neon;
#else
  return isa == Isa::generic;
#endif
}

constexpr int kMaxCpuDim = 576;
constexpr int kCpuTileQ = 64;   // a multiple of every panel
constexpr int kAmxTileQ = 256;  // V is transposed once per tile

/// The format of P. Tensor cores need P in their operand format.
constexpr DType probability_dtype(const FamilyTraits& traits, Inputs inputs, DType dtype) {
  if (!uses_tensor_cores(traits)) return dtype == DType::f64 ? DType::f64 : DType::f32;
  return inputs == Inputs::fp8 ? DType::e4m3 : inputs == Inputs::kv8 ? DType::f16 : dtype;
}

/// The columns of kernels.def that only define the kernel's shape.
struct Shape {
  int head_dim, tile_q, tile_k, stages, warp_rows, threads;
};

constexpr std::int32_t blocks_per_sm(Operation op, const FamilyTraits& traits, Inputs inputs,
                                     const Shape& s) {
  if (traits.persistent) return 1;
  if (traits.math != Math::mma) return 2;
  if (op == Operation::bwd) return core::Sm80BackwardTraits{s.head_dim, s.threads}.blocks_per_sm();
  const int key_bytes = inputs == Inputs::kv8 ? 1 : 2;
  return core::Sm80Traits{s.head_dim,  s.tile_q,  s.tile_k, s.stages,
                          s.warp_rows, s.threads, key_bytes}
      .blocks_per_sm();
}

/// The column `code` of kernels.def. GPUs later than sm_90 can run kernels with PTX only.
enum class Code { sass, ptx };
constexpr int kNewestSass = 90;

constexpr KernelInfo cuda_kernel(const char* id, Operation op, Family family, Inputs inputs,
                                 DType dtype, int v_dim, const Shape& shape, int smem, Code code) {
  const FamilyTraits& traits = traits_of(family);
  KernelInfo kernel{.id = id,
                    .op = op,
                    .family = family,
                    .inputs = inputs,
                    .device = traits.device,
                    .dtype = dtype,
                    .probability_dtype = probability_dtype(traits, inputs, dtype),
                    .isa = Isa::generic,
                    .min_compute_capability = traits.min_cc,
                    .max_compute_capability = code == Code::ptx ? kAnyCc : kNewestSass,
                    .head_dim = shape.head_dim,
                    .v_dim = v_dim,
                    .tile_q = shape.tile_q,
                    .tile_k = shape.tile_k,
                    .threads = shape.threads,
                    .smem_bytes = smem,
                    .blocks_per_sm = blocks_per_sm(op, traits, inputs, shape),
                    .features = Features::none,
                    .compiled = compiled_for_cuda(id)};
  kernel.features = features_of_kernel(traits, kernel);
  if (op == Operation::bwd) kernel.features = kernel.features & kBackwardFeatures;
  return kernel;
}

constexpr KernelInfo cpu_kernel(const char* id, Operation op, Isa isa, DType dtype, int tile_q) {
  const FamilyTraits& traits = traits_of(Family::cpu);
  return {.id = id,
          .op = op,
          .family = Family::cpu,
          .inputs = Inputs::native,
          .device = DeviceType::cpu,
          .dtype = dtype,
          .probability_dtype = isa == Isa::amx && dtype == DType::bf16
                                   ? dtype
                                   : probability_dtype(traits, Inputs::native, dtype),
          .isa = isa,
          .min_compute_capability = 0,
          .max_compute_capability = 0,
          .head_dim = kMaxCpuDim,
          .v_dim = kMaxCpuDim,
          .tile_q = tile_q,
          .tile_k = 0,
          .threads = 0,
          .smem_bytes = 0,
          .blocks_per_sm = 0,
          .features = traits.features & (op == Operation::bwd ? kBackwardFeatures : kAllFeatures),
          .compiled = compiled_for_cpu(isa)};
}

constexpr KernelInfo kKernels[] = {
#define FLASHCORE_KERNEL(id, op, family, inputs, dtype, head_dim, v_dim, tile_q, tile_k, stages, \
                         warp_rows, threads, smem, code)                                         \
  cuda_kernel(#id, Operation::op, Family::family, Inputs::inputs, DType::dtype, v_dim,           \
              {head_dim, tile_q, tile_k, stages, warp_rows, threads}, smem, Code::code),
#include "cuda/kernels.def"
#undef FLASHCORE_KERNEL
#define FLASHCORE_CPU_KERNEL(op, isa, dtype)                                 \
  cpu_kernel(#op "_" #isa "_" #dtype, Operation::op, Isa::isa, DType::dtype, \
             Isa::isa == Isa::amx ? kAmxTileQ : kCpuTileQ),
#define FLASHCORE_CPU_ROWS_KERNEL(op, isa, dtype)                                   \
  cpu_kernel(#op "_" #isa "_" #dtype "_q16", Operation::op, Isa::isa, DType::dtype, \
             core::kGemvRows),
#include "cpu/kernels.def"
#undef FLASHCORE_CPU_ROWS_KERNEL
#undef FLASHCORE_CPU_KERNEL
};

/// The position of a group in kGroups.
constexpr std::size_t group_index(Operation op, Family family, Inputs inputs, DType dtype) {
  constexpr std::size_t kInputs = 3, kDTypes = static_cast<std::size_t>(DType::u8) + 1;
  const auto row =
      static_cast<std::size_t>(op) * std::size(kFamilies) + static_cast<std::size_t>(family);
  return (row * kInputs + static_cast<std::size_t>(inputs)) * kDTypes +
         static_cast<std::size_t>(dtype);
}

struct KernelGroup {
  std::uint8_t begin, end;
};

/// The kernels of each operation, family, inputs and dtype, which are adjacent in the lists.
constexpr auto kGroups = [] {
  std::array<KernelGroup, group_index(Operation::bwd, Family::sm90, Inputs::fp8, DType::u8) + 1>
      groups{};
  for (std::size_t i = 0; i < std::size(kKernels); ++i) {
    const KernelInfo& k = kKernels[i];
    KernelGroup& group = groups[group_index(k.op, k.family, k.inputs, k.dtype)];
    if (group.end == 0) group.begin = static_cast<std::uint8_t>(i);
    group.end = static_cast<std::uint8_t>(i + 1);
  }
  return groups;
}();
static_assert(std::size(kKernels) < 256);
static_assert(
    [] {
      for (const KernelInfo& kernel : kKernels) {
        const int most = kernel.max_compute_capability;
        if (kernel.device == DeviceType::cuda && most > traits_of(kernel).max_cc) return false;
      }
      return true;
    }(),
    "no later GPU runs the PTX of sm_90a");
static_assert(
    [] {
      for (const KernelInfo& kernel : kKernels) {
        if (is_fused(kernel) != std::string_view(kernel.id).ends_with("_fused")) return false;
      }
      return true;
    }(),
    "cmake/cuda_kernels.cmake knows fused kernels by their ids");
static_assert(
    [] {
      std::size_t kernels = 0;
      for (const KernelGroup& group : kGroups) kernels += group.end - group.begin;
      return kernels == std::size(kKernels);
    }(),
    "the kernels of a group are adjacent");

}  // namespace

const char* KernelInfo::family_name() const noexcept {
  return flashcore::family_name(family, inputs);
}

std::span<const KernelInfo> kernels() noexcept { return kKernels; }

std::span<const KernelInfo> kernels_of(Operation op, Family family, Inputs inputs,
                                       DType dtype) noexcept {
  const KernelGroup group = kGroups[group_index(op, family, inputs, dtype)];
  return {kKernels + group.begin, kKernels + group.end};
}

const KernelInfo* find_kernel(const char* id) noexcept {
  if (id == nullptr) return nullptr;
  // fwd_plain_* are the ids of the fwd_generic_* kernels in version 0.1.
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
