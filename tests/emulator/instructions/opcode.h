// An opcode such as `ld.global.v2.f32`, and how it finds its handler.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/machine/address.h"
#include "emulator/machine/program.h"

namespace flashcore::emulator {

class Opcode {
 public:
  explicit Opcode(std::string_view text) : text_(text) {
    while (true) {
      const std::size_t dot = text.find('.');
      parts_.push_back(text.substr(0, dot));
      if (dot == std::string_view::npos) break;
      text = text.substr(dot + 1);
    }
  }
  std::string_view text() const { return text_; }
  std::string_view base() const { return parts_[0]; }
  bool has(std::string_view part) const {
    return std::find(parts_.begin() + 1, parts_.end(), part) != parts_.end();
  }
  bool starts(std::string_view prefix) const { return text_.starts_with(prefix); }
  /// Types in order: cvt.rn.f16.f32 has f16 and f32.
  std::vector<std::string_view> types() const {
    std::vector<std::string_view> types;
    for (std::string_view part : parts_) {
      if (is_type(part)) types.push_back(part);
    }
    return types;
  }
  std::string_view type() const {
    const auto all = types();
    return all.empty() ? std::string_view{} : all.back();
  }
  const std::vector<std::string_view>& parts() const { return parts_; }
  /// The state space; generic without one.
  Space space() const {
    for (std::string_view part : parts_) {
      if (part == "global" || part == "const") return Space::global;
      if (part.starts_with("shared")) return Space::shared;
      if (part == "local") return Space::local;
      if (part.starts_with("param")) return Space::param;
    }
    return Space::generic;
  }
  /// 1, 2, 4 or 8.
  int vector_size() const { return has("v2") ? 2 : has("v4") ? 4 : has("v8") ? 8 : 1; }

  static bool is_type(std::string_view part) {
    static constexpr std::string_view kTypes[] = {
        "pred",  "b8",   "u8",   "s8",   "b16",    "u16",    "s16",  "f16",   "bf16",
        "f16x2", "b32",  "u32",  "s32",  "f32",    "bf16x2", "b64",  "u64",   "s64",
        "f64",   "b128", "e4m3", "e5m2", "e4m3x2", "e5m2x2", "tf32", "u16x2", "s16x2"};
    return std::find(std::begin(kTypes), std::end(kTypes), part) != std::end(kTypes);
  }

 private:
  std::string_view text_;
  std::vector<std::string_view> parts_;
};

/// What the decoder needs to know of an instruction.
struct Recipe {
  Handler handler = nullptr;
  std::uint32_t aux = 0;
  /// Element sizes of immediate operands; 0: the size of the instruction's type.
  int immediate_bytes[8] = {};
};

// One function per group of instructions. They return false if the opcode is not one of theirs.
bool find_integer(const Opcode& opcode, Recipe& recipe);
bool find_bits(const Opcode& opcode, Recipe& recipe);
bool find_float(const Opcode& opcode, Recipe& recipe);
bool find_half(const Opcode& opcode, Recipe& recipe);
bool find_compare(const Opcode& opcode, Recipe& recipe);
bool find_convert(const Opcode& opcode, Recipe& recipe);
bool find_move(const Opcode& opcode, Recipe& recipe);
bool find_memory(const Opcode& opcode, Recipe& recipe);
bool find_atomic(const Opcode& opcode, Recipe& recipe);
bool find_control(const Opcode& opcode, Recipe& recipe);
bool find_warp_collective(const Opcode& opcode, Recipe& recipe);
bool find_barrier(const Opcode& opcode, Recipe& recipe);
bool find_mbarrier(const Opcode& opcode, Recipe& recipe);
bool find_copy(const Opcode& opcode, Recipe& recipe);
bool find_matrix(const Opcode& opcode, Recipe& recipe);
bool find_wgmma(const Opcode& opcode, Recipe& recipe);
bool find_bulk_copy(const Opcode& opcode, Recipe& recipe);

}  // namespace flashcore::emulator
