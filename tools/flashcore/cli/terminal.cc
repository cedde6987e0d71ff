#include "cli/terminal.h"
#include "cli/text.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flashcore::tool {
namespace {

bool wants_colour() {
  static const bool wanted = [] {
    const char* no_colour = std::getenv("NO_COLOR");
    const char* terminal = std::getenv("TERM");
    return isatty(STDOUT_FILENO) != 0 && (no_colour == nullptr || *no_colour == '\0') &&
           terminal != nullptr && std::strcmp(terminal, "dumb") != 0;
  }();
  return wanted;
}

std::string coloured(const char* code, const std::string& text) {
  return wants_colour() ? formatted("\033[{}m{}\033[0m", code, text) : text;
}

}  // namespace

std::string green(const std::string& text) { return coloured("32", text); }
std::string red(const std::string& text) { return coloured("31;1", text); }
std::string yellow(const std::string& text) { return coloured("33", text); }

std::size_t width_of(const std::string& text) {
  std::size_t width = 0;
  bool in_code = false;
  for (const char c : text) {
    if (c == '\033') in_code = true;
    const bool continues = (static_cast<unsigned char>(c) & 0xc0) == 0x80;
    if (!in_code && !continues) ++width;
    if (in_code && c == 'm') in_code = false;
  }
  return width;
}

Table::Table(std::vector<std::string> headings) : headings_(std::move(headings)) {
  for (std::string& heading : headings_) {
    right_.push_back(heading.starts_with('>'));
    if (right_.back()) heading.erase(0, 1);
  }
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(headings_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (const std::string& heading : headings_) widths.push_back(width_of(heading));
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  std::string text;
  const auto append = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const std::string padding(widths[i] - width_of(cells[i]), ' ');
      if (i > 0) line += "  ";
      line += right_[i] ? padding + cells[i] : cells[i] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  append(headings_);
  for (const auto& row : rows_) append(row);
  return text;
}

std::string duration(double us) {
  if (us < 1e3) return formatted("{:.3g} us", us);
  return us < 1e6 ? formatted("{:.3g} ms", us / 1e3) : formatted("{:.4g} s", us / 1e6);
}

std::string microseconds(double value) {
  return formatted("{:.{}f}", value, value < 100 ? 2 : value < 10000 ? 1 : 0);
}

std::string number(double value) {
  if (value == 0) return "0";
  const double size = std::fabs(value);
  return size >= 0.001 && size < 1e5 ? formatted("{:.3g}", value) : formatted("{:.1e}", value);
}

Progress::Progress(std::string unit, std::int64_t total, bool quiet)
    : unit_(std::move(unit)), total_(total), terminal_(isatty(STDERR_FILENO) != 0), quiet_(quiet) {}

Progress::~Progress() { clear(); }

void Progress::update(std::int64_t done, std::int64_t failures, double elapsed_s) {
  const double interval = terminal_ ? 0.1 : 10.0;
  if (quiet_ || elapsed_s - last_s_ < interval) return;
  last_s_ = elapsed_s;
  const double share =
      total_ > 0 ? std::min(1.0, static_cast<double>(done) / static_cast<double>(total_)) : 1.0;
  const double left_s = done > 0 ? elapsed_s * (1 - share) / share : 0;
  const std::string state =
      formatted("{}/{} {}, {:.0f} s, about {:.0f} s left{}", done, total_, unit_, elapsed_s, left_s,
                failures > 0 ? formatted(", {} FAILED", failures) : "");
  if (!terminal_) {
    print_error("flashcore: {}\n", state);
    return;
  }
  constexpr int kBarWidth = 30;
  const int filled = static_cast<int>(share * kBarWidth);
  print_error("\r\033[K[{}{}] {}", std::string(static_cast<std::size_t>(filled), '#'),
              std::string(static_cast<std::size_t>(kBarWidth - filled), '.'), state);
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  print_error("\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

void say(const std::string& message) { print_error("flashcore: {}\n", message); }

}  // namespace flashcore::tool
