// Formatting with fmt. Only text.cc compiles fmt's implementation, because that takes longer than
// the rest of a file.
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace flashcore::tool {

std::string format_arguments(fmt::string_view format, fmt::format_args arguments);

template <typename... Args>
std::string formatted(fmt::format_string<Args...> format, Args&&... args) {
  return format_arguments(format, fmt::make_format_args(args...));
}

/// Prints to standard output.
template <typename... Args>
void print_out(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = format_arguments(format, fmt::make_format_args(args...));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

/// Prints to standard error.
template <typename... Args>
void print_error(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = format_arguments(format, fmt::make_format_args(args...));
  std::fwrite(text.data(), 1, text.size(), stderr);
}

/// A word quoted for a POSIX shell.
std::string quoted(const std::string& word);

/// "a, b, c"
std::string joined(const std::vector<std::string>& words);

}  // namespace flashcore::tool
