#include "cpu/cpu_info.h"

#include <sched.h>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cpu/kernel_table.h"
#include "cpu/thread_pool.h"

namespace flashcore::cpu {
namespace {

constexpr int kMaxThreads = 1024;

int affinity_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

/// CPUs that the cgroup's quota allows; kMaxThreads without a quota.
int cgroup_threads() {
  // Version 2: the group of this process and all groups above it.
  std::string group;
  std::ifstream membership("/proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {
    if (line.rfind("0::", 0) == 0) group = line.substr(3);
  }
  double cpus = kMaxThreads;
  for (;;) {
    std::ifstream limit("/sys/fs/cgroup" + group + "/cpu.max");
    std::string quota;
    double period = 0;
    if (limit >> quota >> period && quota != "max" && period > 0) {
      cpus = std::min(cpus, std::atof(quota.c_str()) / period);
    }
    const std::size_t slash = group.rfind('/');
    if (slash == std::string::npos) break;
    group.resize(slash);
  }
  // Version 1.
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double quota = -1, period = 0;
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) {
    cpus = std::min(cpus, quota / period);
  }
  return std::max(1, static_cast<int>(cpus));
}

int requested_threads() {
  const char* text = std::getenv("FLASHCORE_THREADS");
  const int wanted = text == nullptr ? 0 : std::atoi(text);
  return wanted > 0 ? std::min(wanted, kMaxThreads) : 0;
}

std::string cpu_name() {
  std::string implementer, part;
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.rfind("model name", 0) == 0) return value;
    if (line.rfind("CPU implementer", 0) == 0) implementer = value;
    if (line.rfind("CPU part", 0) == 0) part = value;
  }
  if (implementer == "0x41" && part == "0xd0c") return "Arm Neoverse-N1";
  if (implementer == "0x41" && part == "0xd40") return "Arm Neoverse-V1";
  if (implementer == "0x41" && part == "0xd4f") return "Arm Neoverse-V2";
  if (!part.empty()) return "CPU, implementer " + implementer + " part " + part;
  return "CPU";
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The rate of `task` over all threads: the best of five repetitions, each long enough to time.
template <typename Task>
double best_rate(int threads, double amount_per_thread, Task task) {
  double best = 0;
  for (int repetition = 0; repetition < 5; ++repetition) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(
        threads, threads,
        [](void* context, std::int64_t index, int) { (*static_cast<Task*>(context))(index); },
        &task);
    best = std::max(best, amount_per_thread * threads / seconds_since(start));
  }
  return best;
}

#if defined(__x86_64__)

/// True if the CPU has bf16 matrix tiles and the system lets this process use them. The permission
/// holds for all threads of the process and for its children.
bool request_amx() noexcept {
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return false;
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, since Linux 5.16
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() noexcept {
  static const bool available = request_amx();
  return available;
}

#endif

/// The instruction set that FLASHCORE_ISA names, if this machine has it; otherwise `best`.
Isa requested_isa(Isa best) noexcept {
  const char* text = std::getenv("FLASHCORE_ISA");
  if (text == nullptr) return best;
  for (const Isa isa : {Isa::generic, Isa::neon, Isa::avx2, Isa::avx512, Isa::vnni, Isa::amx}) {
    if (std::strcmp(text, to_string(isa)) != 0) continue;
    return isa_available(isa) && isa_kernels(isa) != nullptr ? isa : best;
  }
  return best;
}

}  // namespace

bool isa_available(Isa isa) noexcept {
  switch (isa) {
    case Isa::generic: return true;
#if defined(__aarch64__)
    case Isa::neon: return true;
#elif defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return isa_available(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq");
    case Isa::vnni: return isa_available(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
    case Isa::amx: return isa_available(Isa::vnni) && has_amx();
#endif
    default: return false;
  }
}

DeviceInfo query_cpu() noexcept {
  DeviceInfo info;
  info.device = {DeviceType::cpu, 0};
  info.isa = Isa::generic;
  for (const Isa isa : {Isa::neon, Isa::avx2, Isa::avx512, Isa::vnni, Isa::amx}) {
    if (isa_available(isa) && isa_kernels(isa) != nullptr) info.isa = isa;
  }
  info.isa = requested_isa(info.isa);
  info.threads = 1;
  try {
    const int wanted = requested_threads();
    info.threads = wanted > 0 ? wanted : std::min(affinity_threads(), cgroup_threads());
    std::snprintf(info.name, sizeof info.name, "%s", cpu_name().c_str());
  } catch (const std::bad_alloc&) {
    std::snprintf(info.name, sizeof info.name, "CPU");
  }
  return info;
}

Status measure_rates(DeviceInfo& info) noexcept {
  const IsaKernels* kernels = isa_kernels(info.isa);
  if (kernels == nullptr) {
    return Status(StatusCode::unsupported, "measure_rates: this build has no kernels for the ISA");
  }
  try {
    constexpr std::int64_t kIterations = 1'000'000;
    alignas(64) float probe[32] = {};
    const double flops = kernels->peak(1, probe) * kIterations;
    info.f32_tflops = best_rate(info.threads, flops,
                                [&](std::int64_t) {
                                  alignas(64) float buffer[32] = {};
                                  kernels->peak(kIterations, buffer);
                                }) /
                      1e12;

    // A read stream much larger than the last-level cache; each thread sums its own words.
    constexpr std::int64_t kWords = 4 << 20;  // 32 MiB per thread
    const std::int64_t threads = std::min(info.threads, 16);
    std::vector<std::uint64_t> data(static_cast<std::size_t>(threads * kWords), 1);
    std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads));
    info.memory_gbs = best_rate(static_cast<int>(threads), kWords * 8.0,
                                [&](std::int64_t t) {
                                  std::uint64_t sum = 0;
                                  const std::uint64_t* words = data.data() + t * kWords;
                                  for (std::int64_t i = 0; i < kWords; ++i) sum += words[i];
                                  sums[static_cast<std::size_t>(t)] = sum;
                                }) /
                      1e9;
    for (const std::uint64_t sum : sums) {
      if (sum != static_cast<std::uint64_t>(kWords)) {
        return Status(StatusCode::internal, "measure_rates: the sum of the read stream is wrong");
      }
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::out_of_memory, "out of memory");
  }
}

}  // namespace flashcore::cpu
