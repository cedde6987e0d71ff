#include <string_view>

#include "flashcore/attention.h"
#include "generated/fingerprint.h"  // written by cmake/fingerprint.cmake from scripts/fingerprint
#include "plan/kernel_traits.h"

namespace flashcore {
namespace {

struct Fingerprint {
  std::string_view name;
  const char* hash;
};
constexpr Fingerprint kFingerprints[] = {FLASHCORE_FINGERPRINTS};

const char* fingerprint_of(std::string_view name) noexcept {
  for (const Fingerprint& fingerprint : kFingerprints) {
    if (fingerprint.name == name) return fingerprint.hash;
  }
  return nullptr;
}

}  // namespace

const char* version() noexcept { return FLASHCORE_VERSION; }

const char* source_fingerprint(const char* family) noexcept {
  if (family == nullptr || *family == '\0') return fingerprint_of("tree");
  for (const FamilyTraits& traits : kFamilies) {
    for (const char* name : traits.names) {
      if (name != nullptr && std::string_view(name) == family) {
        return fingerprint_of(traits.names[0]);  // all inputs of a family share its sources
      }
    }
  }
  return nullptr;
}

}  // namespace flashcore
