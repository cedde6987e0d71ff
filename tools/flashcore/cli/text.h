// Formatting, by fmt. Only text.cc compiles fmt itself: in every file it would take longer than the
// file.
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

/// On standard output.
template <typename... Args>
void print_out(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = format_arguments(format, fmt::make_format_args(args...));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

/// On standard error.
template <typename... Args>
void print_error(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = format_arguments(format, fmt::make_format_args(args...));
  std::fwrite(text.data(), 1, text.size(), stderr);
}

/// A word as a POSIX shell takes it.
std::string quoted(const std::string& word);

/// "a, b, c"
std::string joined(const std::vector<std::string>& words);

}  // namespace flashcore::tool
