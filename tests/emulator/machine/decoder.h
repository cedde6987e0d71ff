// The decoder's parts: names (decode.cc), operands and instructions (decode_instruction.cc).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "emulator/instructions/opcode.h"
#include "emulator/machine/decode.h"

namespace flashcore::emulator {

/// Reserves aligned bytes and returns their offset.
std::size_t reserve(std::size_t& used, std::size_t bytes, std::size_t align);

class Decoder {
 public:
  Decoder(ptx::Module& module, const GlobalAddresses& globals);
  std::unique_ptr<Program> run(ptx::Function& entry);

 private:
  struct Location {
    Space space;
    std::uint64_t address;
  };
  using Variables = std::map<std::string_view, Location>;
  struct RegisterRange {
    std::string_view name;
    int count;
    std::size_t offset;
    int bytes;  // 0: predicates
  };
  struct ScopeNames {
    std::vector<RegisterRange> registers;
    Variables variables;
  };
  struct Frame {
    ptx::Function& function;
    std::vector<ScopeNames> scopes;
    Variables params;
    bool entry;
  };
  struct Register {
    std::int32_t offset;
    int bytes;
  };

  void inline_function(ptx::Function& function, const Variables& params, bool entry);
  void declare(Frame& frame, const Variables& params);
  void call(Frame& frame, const ptx::Statement& statement);
  static std::size_t find_label(const ptx::Function& function, const ptx::Statement& statement);
  void add_dynamic_base(std::size_t constant);
  void fix_pointers();

  std::optional<Register> find_register(const Frame& frame, int scope, std::string_view name) const;
  std::optional<Location> find_variable(const Frame& frame, int scope, std::string_view name);
  void add_instruction(Frame& frame, const ptx::Statement& statement, std::string_view opcode);
  Recipe find_recipe(const Opcode& opcode, const ptx::Statement& statement,
                     Instruction& instruction);

  /// Appends the operand, flattened. `bytes`: the size of an immediate's elements.
  void add_operand(Frame& frame, const ptx::Statement& statement, const ptx::Operand& operand,
                   int bytes, Instruction& instruction);
  void add_address(Frame& frame, const ptx::Statement& statement, const ptx::Operand& operand,
                   Instruction& instruction);
  void push(std::int32_t operand, int bytes, Instruction& instruction);
  std::int32_t constant(std::uint64_t bits, int bytes);
  std::int32_t variable_constant(const Location& location, int bytes, bool dynamic);
  std::int32_t scratch();

  ptx::Module& module_;
  const GlobalAddresses& globals_;
  std::unique_ptr<Program> program_;
  std::map<std::pair<std::uint64_t, int>, std::int32_t> known_constants_;
  std::vector<std::size_t> dynamic_shared_constants_;
  std::set<std::size_t> narrow_constants_;
  std::set<std::string_view> dynamic_shared_;
  std::map<std::string_view, Location> module_shared_;
  std::int32_t scratch_ = -1;
  int depth_ = 0;
};

}  // namespace flashcore::emulator
