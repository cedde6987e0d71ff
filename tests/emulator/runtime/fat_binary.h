// PTX in the fat binaries that nvcc embeds in objects.
#pragma once

#include <string_view>
#include <vector>

namespace flashcore::emulator {

/// The PTX texts of a fat binary, which __cudaRegisterFatBinary gets. Compressed ones are an error:
/// compile with --no-compress.
std::vector<std::string_view> ptx_of(const void* wrapper);

}  // namespace flashcore::emulator
