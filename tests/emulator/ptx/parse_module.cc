// Declarations of a PTX module.
#include <cstdlib>

#include "emulator/ptx/lexer.h"
#include "emulator/ptx/module.h"
#include "emulator/ptx/parse.h"

namespace flashcore::emulator::ptx {

int size_of(std::string_view type) {
  if (type == "pred") return 0;
  if (type == "e4m3" || type == "e5m2") return 1;
  if (type.ends_with("128")) return 16;
  if (type.ends_with("64")) return 8;
  if (type.ends_with("32") || type.ends_with("16x2")) return 4;
  if (type.ends_with("16") || type == "e4m3x2" || type == "e5m2x2") return 2;
  if (type.ends_with("8")) return 1;
  throw std::runtime_error("unknown PTX type " + std::string(type));
}

std::int64_t parse_integer(std::string_view token) {
  return static_cast<std::int64_t>(std::strtoull(std::string(token).c_str(), nullptr, 0));
}

Variable parse_variable(Lexer& in) {
  Variable variable;
  variable.space = in.take().substr(1);
  while (true) {
    if (in.accept(".align")) {
      variable.align = static_cast<int>(parse_integer(in.take()));
    } else if (in.accept(".ptr") || in.accept(".global") || in.accept(".const")) {
    } else {
      break;
    }
  }
  variable.type = in.take().substr(1);
  const int element = size_of(variable.type);
  if (variable.align == 1) variable.align = element;
  variable.name = in.take();
  variable.bytes = element;
  if (in.accept("[")) {
    variable.bytes = in.is("]") ? 0 : parse_integer(in.take()) * element;
    in.expect("]");
  }
  if (in.accept("=")) {
    const bool list = in.accept("{");
    do {
      const bool minus = in.accept("-");
      const std::int64_t value = parse_integer(in.take()) * (minus ? -1 : 1);
      for (int i = 0; i < element; ++i) {
        variable.initial.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
      }
    } while (list && in.accept(","));
    if (list) in.expect("}");
  }
  return variable;
}

namespace {

std::vector<Variable> parse_params(Lexer& in) {
  std::vector<Variable> params;
  if (!in.accept("(")) return params;
  while (!in.accept(")")) {
    params.push_back(parse_variable(in));
    in.accept(",");
  }
  return params;
}

void parse_function(Lexer& in, Module& module, bool entry) {
  Function function;
  function.entry = entry;
  if (!entry) function.results = parse_params(in);
  function.name = in.take();
  function.params = parse_params(in);
  while (!in.is("{") && !in.is(";")) {
    if (in.accept(".maxntid")) {
      function.max_threads = 1;
      do {
        function.max_threads *= static_cast<int>(parse_integer(in.take()));
      } while (in.accept(","));
    } else if (in.accept(".minnctapersm")) {
      function.min_ctas = static_cast<int>(parse_integer(in.take()));
    } else {
      in.take();  // other directives do not change what a kernel computes
    }
  }
  if (in.accept(";")) return;  // a declaration
  const std::size_t first = in.position() + 1;
  function.body_line = in.line();
  int depth = 0;
  do {
    if (in.is("{")) ++depth;
    if (in.is("}")) --depth;
    if (in.done()) in.fail("the body of a function does not end");
    if (depth > 0) in.take();
  } while (depth > 0);
  function.body_text = std::string_view(module.text).substr(first, in.position() - first);
  in.expect("}");
  module.functions[function.name] = std::move(function);
}

}  // namespace

void parse_module(Module& module) {
  Lexer in(module.text, 1);
  bool is_extern = false;
  while (!in.done()) {
    if (in.is(".version") || in.is(".address_size") || in.is(".file") || in.is(".loc")) {
      in.skip_line();
    } else if (in.accept(".target")) {
      module.target = std::string(in.token());
      in.skip_line();
    } else if (in.accept(".visible") || in.accept(".weak") || in.accept(".common")) {
    } else if (in.accept(".extern")) {
      is_extern = true;
    } else if (in.accept(".entry")) {
      parse_function(in, module, true);
      is_extern = false;
    } else if (in.accept(".func")) {
      parse_function(in, module, false);
      is_extern = false;
    } else if (in.is(".global") || in.is(".shared") || in.is(".const")) {
      Variable variable = parse_variable(in);
      variable.is_extern = is_extern;
      is_extern = false;
      in.expect(";");
      module.variables[variable.name] = std::move(variable);
    } else if (in.accept(".section")) {
      while (!in.accept("}")) in.take();
    } else if (!in.accept(";")) {
      in.fail("unknown declaration");
    }
  }
}

}  // namespace flashcore::emulator::ptx
