#include "emulator/runtime/kernels.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "emulator/machine/memory.h"
#include "emulator/runtime/device.h"
#include "emulator/runtime/fat_binary.h"

namespace flashcore::emulator {
namespace {

struct LoadedModule {
  ptx::Module module;
  GlobalAddresses globals;
};

struct Registry {
  std::recursive_mutex mutex;
  std::map<const void*, Kernel> kernels;                         // by host function
  std::map<const void*, std::unique_ptr<LoadedModule>> modules;  // by fat binary
};

Registry& registry() {
  static auto* const all = new Registry;  // never destroyed: launches may come from destructors
  return *all;
}

/// sm_90a gives 90 and true.
struct Target {
  int architecture = 0;
  bool specific = false;
};
Target target_of(std::string_view text) {
  const std::size_t at = text.find(".target sm_");
  if (at == std::string_view::npos) return {};
  char* end = nullptr;
  const std::string digits(text.substr(at + 11, 8));
  const auto architecture = static_cast<int>(std::strtol(digits.c_str(), &end, 10));
  return {architecture, *end == 'a'};
}

/// The PTX that a driver would choose: the newest that the device can run.
std::string_view choose(const std::vector<std::string_view>& texts) {
  const int device = device_model().compute_capability;
  std::string_view best;
  int best_architecture = -1;
  for (const std::string_view text : texts) {
    const Target target = target_of(text);
    const bool usable =
        target.specific ? target.architecture == device : target.architecture <= device;
    const int rank = 2 * target.architecture + target.specific;
    if (usable && rank > best_architecture) {
      best = text;
      best_architecture = rank;
    }
  }
  if (best.empty()) {
    throw std::runtime_error("no PTX for sm_" + std::to_string(device) + " in this build");
  }
  return best;
}

void place_variables(LoadedModule& loaded) {
  for (const auto& [name, variable] : loaded.module.variables) {
    if (variable.space == "shared" || variable.is_extern) continue;
    void* data = device_memory().allocate(
        static_cast<std::size_t>(std::max<std::int64_t>(variable.bytes, 1)));
    std::memset(data, 0, static_cast<std::size_t>(variable.bytes));
    std::memcpy(data, variable.initial.data(), variable.initial.size());
    loaded.globals[name] = reinterpret_cast<std::uint64_t>(data);
  }
}

LoadedModule& module_of(const void* binary) {
  auto& loaded = registry().modules[binary];
  if (loaded == nullptr) {
    auto fresh = std::make_unique<LoadedModule>();
    fresh->module.text = std::string(choose(ptx_of(binary)));
    parse_module(fresh->module);
    place_variables(*fresh);
    loaded = std::move(fresh);
  }
  return *loaded;
}

}  // namespace

void register_kernel(const void* binary, const void* host, const char* name) {
  const std::lock_guard lock(registry().mutex);
  Kernel& kernel = registry().kernels[host];
  kernel.name = name;
  kernel.binary = binary;
}

Kernel* find_kernel(const void* host) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().kernels.find(host);
  return found == registry().kernels.end() ? nullptr : &found->second;
}

const Program& program_of(Kernel& kernel) {
  const std::lock_guard lock(registry().mutex);
  if (kernel.program == nullptr) {
    LoadedModule& loaded = module_of(kernel.binary);
    const auto function = loaded.module.functions.find(kernel.name);
    if (function == loaded.module.functions.end())
      throw std::runtime_error("no PTX of kernel " + kernel.name);
    kernel.program = decode(loaded.module, function->second, loaded.globals);
  }
  return *kernel.program;
}

}  // namespace flashcore::emulator
