// Tokens of PTX: words (names, opcodes, numbers), strings and single punctuation characters.
#pragma once

#include <cctype>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flashcore::emulator::ptx {

class Lexer {
 public:
  Lexer(std::string_view text, int line) : text_(text), line_(line) { next(); }

  std::string_view token() const { return token_; }  // empty at the end
  bool done() const { return token_.empty(); }
  bool is(std::string_view token) const { return token_ == token; }
  int line() const { return token_line_; }
  std::size_t position() const { return start_; }

  std::string_view take() {
    const std::string_view token = token_;
    next();
    return token;
  }
  bool accept(std::string_view token) {
    if (token_ != token) return false;
    next();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) fail("wanted '" + std::string(token) + "'");
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX line " + std::to_string(token_line_) + ": " + what + " at '" +
                             std::string(token_) + "'");
  }
  void skip_line() {
    const int line = token_line_;
    while (!done() && token_line_ == line) next();
  }

 private:
  static bool in_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
  }

  void skip_blanks() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(c))) {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (text_.substr(at_, 2) == "/*") {
        for (; at_ < text_.size() && text_.substr(at_, 2) != "*/"; ++at_)
          line_ += text_[at_] == '\n';
        at_ += 2;
      } else {
        return;
      }
    }
  }

  void next() {
    skip_blanks();
    start_ = at_;
    token_line_ = line_;
    if (at_ >= text_.size()) {
      token_ = {};
      return;
    }
    if (text_[at_] == '"') {
      for (++at_; at_ < text_.size() && text_[at_] != '"';) ++at_;
      ++at_;
    } else if (in_word(text_[at_])) {
      // "::" is part of an opcode (shared::cta), ":" ends a label.
      while (at_ < text_.size()) {
        if (in_word(text_[at_])) {
          ++at_;
        } else if (text_.substr(at_, 2) == "::") {
          at_ += 2;
        } else {
          break;
        }
      }
    } else {
      ++at_;
    }
    token_ = text_.substr(start_, at_ - start_);
  }

  std::string_view text_, token_;
  std::size_t at_ = 0, start_ = 0;
  int line_ = 1, token_line_ = 1;
};

}  // namespace flashcore::emulator::ptx
