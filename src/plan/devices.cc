#include "plan/devices.h"

#include <cstring>

#include "core/error.h"

namespace flashcore {
namespace {

DeviceInfo gpu(const char* name, int compute_capability, int sm_count, int smem_per_block_kib,
               int smem_per_sm_kib, int threads_per_sm, int l2_mib, double memory_gbs,
               double f32_tflops, double tensor16_tflops) {
  DeviceInfo info;
  info.device = {DeviceType::cuda, 0};
  std::strncpy(info.name, name, sizeof info.name - 1);
  info.compute_capability = compute_capability;
  info.sm_count = sm_count;
  info.smem_per_block_bytes = smem_per_block_kib * 1024;
  info.smem_per_sm_bytes = smem_per_sm_kib * 1024;
  info.threads_per_sm = threads_per_sm;
  info.l2_bytes = std::int64_t{l2_mib} << 20;
  info.memory_gbs = memory_gbs;
  info.f32_tflops = f32_tflops;
  info.tensor16_tflops = tensor16_tflops;
  return info;
}

DeviceInfo cpu(const char* name, Isa isa, int threads, double memory_gbs, double f32_tflops) {
  DeviceInfo info;
  std::strncpy(info.name, name, sizeof info.name - 1);
  info.isa = isa;
  info.threads = threads;
  info.memory_gbs = memory_gbs;
  info.f32_tflops = f32_tflops;
  return info;
}

}  // namespace

// GPU figures are from datasheets; the CPU rows describe typical servers.
std::span<const NamedDevice> named_devices() noexcept {
  static const NamedDevice devices[] = {
      {"h200", gpu("NVIDIA H200", 90, 132, 227, 228, 2048, 60, 4800, 67, 989)},
      {"h100", gpu("NVIDIA H100 SXM", 90, 132, 227, 228, 2048, 50, 3350, 67, 989)},
      {"a100", gpu("NVIDIA A100 80GB", 80, 108, 163, 164, 2048, 40, 2039, 19.5, 312)},
      {"l4", gpu("NVIDIA L4", 89, 58, 99, 100, 1536, 48, 300, 30.3, 121)},
      {"t4", gpu("NVIDIA T4", 75, 40, 64, 64, 1024, 4, 320, 8.1, 65)},
      {"cpu-neon", cpu("64 Arm Neoverse-V1 cores", Isa::neon, 64, 300, 5.3)},
      {"cpu-avx2", cpu("16 x86-64 cores with AVX2", Isa::avx2, 16, 80, 1.5)},
      {"cpu-avx512", cpu("32 x86-64 cores with AVX-512", Isa::avx512, 32, 300, 5)},
      {"cpu-amx", cpu("32 x86-64 cores with AMX", Isa::amx, 32, 300, 5)},
      {"cpu-generic", cpu("1 core without vector kernels", Isa::generic, 1, 10, 0.01)},
  };
  return devices;
}

Result<DeviceInfo> named_device(const char* name) noexcept {
  if (name != nullptr && std::strcmp(name, "cpu") == 0) return device_info(Device{});
  if (name != nullptr && std::strcmp(name, "cpu-plain") == 0) name = "cpu-generic";  // name in 0.1
  for (const NamedDevice& device : named_devices()) {
    if (name != nullptr && std::strcmp(device.name, name) == 0) return device.info;
  }
  return invalid_argument(
      "device is \"%s\"; wanted cpu, h200, h100, a100, l4, t4, cpu-neon, cpu-avx2, cpu-avx512, "
      "cpu-amx or cpu-generic",
      name == nullptr ? "(null)" : name);
}

}  // namespace flashcore
