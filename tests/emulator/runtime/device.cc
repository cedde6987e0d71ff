#include "emulator/runtime/device.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace flashcore::emulator {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
constexpr int kKiB = 1024, kMiB = 1 << 20;

constexpr DeviceModel kModels[] = {
    {"emulated T4", 75, 40, 64 * kKiB, 64 * kKiB, 1024, 4 * kMiB, 1590000, 5001000, 256, 16 * kGiB},
    {"emulated A100", 80, 108, 163 * kKiB, 164 * kKiB, 2048, 40 * kMiB, 1410000, 1512000, 5120,
     80 * kGiB},
    {"emulated RTX 3090", 86, 82, 99 * kKiB, 100 * kKiB, 1536, 6 * kMiB, 1695000, 9751000, 384,
     24 * kGiB},
    {"emulated RTX 4090", 89, 128, 99 * kKiB, 100 * kKiB, 1536, 72 * kMiB, 2520000, 10501000, 384,
     24 * kGiB},
    {"emulated H200", 90, 132, 227 * kKiB, 228 * kKiB, 2048, 50 * kMiB, 1980000, 3201000, 6144,
     141 * kGiB},
};

int environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == 0 ? otherwise : std::atoi(text);
}

DeviceModel make_model() {
  const char* text = std::getenv("FLASHCORE_EMULATE");
  std::string wanted = text == nullptr || *text == 0 ? "sm_90" : text;
  if (wanted == "sm_90a") wanted = "sm_90";
  for (DeviceModel model : kModels) {
    if (wanted != "sm_" + std::to_string(model.compute_capability)) continue;
    model.sm_count = environment("FLASHCORE_EMULATE_SMS", model.sm_count);
    return model;
  }
  std::fprintf(stderr, "FLASHCORE_EMULATE is %s; wanted sm_75, sm_80, sm_86, sm_89 or sm_90\n",
               wanted.c_str());
  std::exit(2);
}

}  // namespace

const DeviceModel& device_model() {
  static const DeviceModel model = make_model();
  return model;
}

std::uint64_t next_seed() {
  static const int seed = environment("FLASHCORE_EMULATE_SEED", 0);
  static std::atomic<std::uint64_t> launches{0};
  return seed == 0 ? 0 : static_cast<std::uint64_t>(seed) * 1000003 + ++launches;
}

int resident_ctas() {
  static const int ctas = environment("FLASHCORE_EMULATE_CTAS", 4);
  return ctas < 1 ? 1 : ctas;
}

bool finds_races() {
  static const bool finds = environment("FLASHCORE_EMULATE_RACES", 0) != 0;
  return finds;
}

}  // namespace flashcore::emulator
