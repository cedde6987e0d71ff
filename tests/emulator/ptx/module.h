// PTX as parsed: functions, their scopes of names, and statements. Names point into the text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flashcore::emulator::ptx {

/// An operand as written. Elements: of a vector, an address or a list of arguments.
struct Operand {
  enum class Kind { name, integer, float32, float64, vector, address, arguments };
  Kind kind = Kind::name;
  std::string_view name;
  std::int64_t value = 0;   // an integer, the bits of a float, or the displacement after a name
  bool negated = false;     // !name
  std::string_view second;  // name|second
  std::vector<Operand> elements;
};

struct Statement {
  int line = 0;
  int scope = 0;
  std::string_view guard;  // empty without one
  bool guard_negated = false;
  std::string_view opcode;
  std::vector<Operand> operands;
};

/// A variable or a parameter. An extern array has no size.
struct Variable {
  std::string_view name, space, type;
  int align = 1;
  std::int64_t bytes = 0;
  bool is_extern = false;
  std::vector<std::uint8_t> initial;
};

/// `.reg .b32 %r<8>` declares %r0 to %r7; count is -1 for a single register.
struct Registers {
  std::string_view name, type;
  int count = -1;
};

/// The names between one pair of braces.
struct Scope {
  int parent = -1;
  std::vector<Registers> registers;
  std::vector<Variable> variables;
  std::map<std::string_view, std::size_t> labels;  // index of the statement
};

struct Function {
  std::string_view name;
  bool entry = false;
  std::vector<Variable> results, params;
  int max_threads = 0, min_ctas = 1;
  std::string_view body_text;  // without the outer braces; empty for a declaration
  int body_line = 0;
  // Filled by parse_body().
  bool parsed = false;
  std::vector<Scope> scopes;
  std::vector<Statement> statements;
};

struct Module {
  std::string text;
  std::string target;  // such as sm_90a
  std::map<std::string_view, Function> functions;
  std::map<std::string_view, Variable> variables;
};

/// The size of a fundamental type in bytes; 0 for .pred. `type` has no dot.
int size_of(std::string_view type);

/// Reads the declarations of a module. Ends in std::runtime_error with the line if it cannot.
void parse_module(Module& module);

/// Reads the body of a function, once.
void parse_body(Function& function);

}  // namespace flashcore::emulator::ptx
