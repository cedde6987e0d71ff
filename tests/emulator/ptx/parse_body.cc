// The statements of a PTX function.
#include <cctype>
#include <cstdlib>

#include "emulator/ptx/parse.h"

namespace flashcore::emulator::ptx {
namespace {

/// `0f3F800000` and `0d…` give the bits of a float.
Operand parse_number(std::string_view token) {
  Operand operand;
  if (token.size() > 2 && token[0] == '0' && (token[1] == 'f' || token[1] == 'F')) {
    operand.kind = Operand::Kind::float32;
    operand.value =
        static_cast<std::int64_t>(std::strtoull(std::string(token.substr(2)).c_str(), nullptr, 16));
  } else if (token.size() > 2 && token[0] == '0' && (token[1] == 'd' || token[1] == 'D')) {
    operand.kind = Operand::Kind::float64;
    operand.value =
        static_cast<std::int64_t>(std::strtoull(std::string(token.substr(2)).c_str(), nullptr, 16));
  } else {
    operand.kind = Operand::Kind::integer;
    operand.value = parse_integer(token);
  }
  return operand;
}

Operand parse_operand(Lexer& in);

std::vector<Operand> parse_list(Lexer& in, std::string_view end) {
  std::vector<Operand> list;
  while (!in.accept(end)) {
    list.push_back(parse_operand(in));
    in.accept(",");
  }
  return list;
}

Operand parse_operand(Lexer& in) {
  Operand operand;
  if (in.accept("{")) {
    operand.kind = Operand::Kind::vector;
    operand.elements = parse_list(in, "}");
  } else if (in.accept("[")) {
    operand.kind = Operand::Kind::address;
    operand.elements = parse_list(in, "]");
  } else if (in.accept("(")) {
    operand.kind = Operand::Kind::arguments;
    operand.elements = parse_list(in, ")");
  } else if (in.accept("-")) {
    operand = parse_number(in.take());
    operand.value = -operand.value;
  } else if (!in.done() && std::isdigit(static_cast<unsigned char>(in.token()[0]))) {
    operand = parse_number(in.take());
  } else {
    operand.negated = in.accept("!");
    operand.name = in.take();
    if (in.accept("|")) operand.second = in.take();
    if (in.accept("+")) {
      const bool minus = in.accept("-");
      operand.value = parse_integer(in.take()) * (minus ? -1 : 1);
    } else if (in.accept("-")) {
      operand.value = -parse_integer(in.take());
    }
  }
  return operand;
}

void parse_registers(Lexer& in, Scope& scope) {
  const std::string_view type = in.take().substr(1);
  do {
    Registers registers{in.take(), type};
    if (in.accept("<")) {
      registers.count = static_cast<int>(parse_integer(in.take()));
      in.expect(">");
    }
    scope.registers.push_back(registers);
  } while (in.accept(","));
  in.expect(";");
}

class BodyParser {
 public:
  explicit BodyParser(Function& function)
      : function_(function), in_(function.body_text, function.body_line) {
    function_.scopes.push_back({});
  }

  void parse() {
    while (!in_.done()) parse_one();
    if (scope_ != 0) in_.fail("a brace is not closed");
  }

 private:
  void parse_one() {
    if (in_.accept("{")) {
      Scope inner;
      inner.parent = scope_;
      function_.scopes.push_back(std::move(inner));
      scope_ = static_cast<int>(function_.scopes.size()) - 1;
    } else if (in_.accept("}")) {
      scope_ = function_.scopes[scope_].parent;
    } else if (in_.accept(".reg")) {
      parse_registers(in_, function_.scopes[scope_]);
    } else if (in_.is(".shared") || in_.is(".local") || in_.is(".param")) {
      function_.scopes[scope_].variables.push_back(parse_variable(in_));
      in_.expect(";");
    } else if (in_.is(".loc") || in_.is(".pragma") || in_.is(".file")) {
      in_.skip_line();
    } else if (!in_.accept(";")) {
      parse_statement();
    }
  }

  void parse_statement() {
    Statement statement;
    statement.line = in_.line();
    statement.scope = scope_;
    if (in_.accept("@")) {
      statement.guard_negated = in_.accept("!");
      statement.guard = in_.take();
    }
    statement.opcode = in_.take();
    if (in_.accept(":")) {
      function_.scopes[scope_].labels[statement.opcode] = function_.statements.size();
      return;
    }
    while (!in_.accept(";")) {
      if (in_.done()) in_.fail("an instruction does not end");
      statement.operands.push_back(parse_operand(in_));
      in_.accept(",");
    }
    function_.statements.push_back(std::move(statement));
  }

  Function& function_;
  Lexer in_;
  int scope_ = 0;
};

}  // namespace

void parse_body(Function& function) {
  if (function.parsed) return;
  BodyParser(function).parse();
  function.parsed = true;
}

}  // namespace flashcore::emulator::ptx
