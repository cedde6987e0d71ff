#include <cstring>

#include "flashcore/attention.h"
#include "generated/fingerprint.h"  // written by cmake/fingerprint.cmake from scripts/fingerprint

namespace flashcore {

const char* version() noexcept { return FLASHCORE_VERSION; }

const char* source_fingerprint(const char* family) noexcept {
  if (family == nullptr || *family == '\0') return FLASHCORE_FINGERPRINT_TREE;
  if (std::strcmp(family, "cpu") == 0) return FLASHCORE_FINGERPRINT_CPU;
  if (std::strcmp(family, "simt") == 0) return FLASHCORE_FINGERPRINT_SIMT;
  if (std::strcmp(family, "sm80") == 0) return FLASHCORE_FINGERPRINT_SM80;
  if (std::strcmp(family, "sm80_8bit") == 0) return FLASHCORE_FINGERPRINT_SM80;  // the same files
  if (std::strcmp(family, "sm90_e4m3") == 0) return FLASHCORE_FINGERPRINT_SM90;
  if (std::strcmp(family, "sm90") == 0) return FLASHCORE_FINGERPRINT_SM90;
  return nullptr;
}

}  // namespace flashcore
