#include "emulator/runtime/fat_binary.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace flashcore::emulator {
namespace {

struct Wrapper {
  std::uint32_t magic, version;
  const std::uint8_t* data;
  const void* names;
};
struct Header {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t bytes;  // of all entries
};
struct Entry {
  std::uint16_t kind, version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;
  std::uint32_t compressed_bytes, options;
  std::uint16_t minor, major;
  std::uint32_t architecture;
};
constexpr std::uint32_t kWrapperMagic = 0x466243b1, kMagic = 0xba55ed50;
constexpr std::uint16_t kPtx = 1;

template <typename T>
T read(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

std::vector<std::string_view> ptx_of(const void* pointer) {
  const auto wrapper = read<Wrapper>(static_cast<const std::uint8_t*>(pointer));
  if (wrapper.magic != kWrapperMagic) throw std::runtime_error("not a fat binary");
  const auto header = read<Header>(wrapper.data);
  if (header.magic != kMagic) throw std::runtime_error("not the data of a fat binary");
  std::vector<std::string_view> texts;
  const std::uint8_t* at = wrapper.data + header.header_bytes;
  for (const std::uint8_t* end = at + header.bytes; at < end;) {
    const auto entry = read<Entry>(at);
    const char* text = reinterpret_cast<const char*>(at) + entry.header_bytes;
    if (entry.kind == kPtx) {
      if (entry.compressed_bytes != 0) {
        throw std::runtime_error("the PTX is compressed: compile with --compress-mode=none");
      }
      texts.emplace_back(text, strnlen(text, entry.bytes));
    }
    at += entry.header_bytes + entry.bytes;
  }
  return texts;
}

}  // namespace flashcore::emulator
