// Output for people: tables, colours, progress, numbers with units.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashcore::tool {

/// Colour only on a terminal, and not if NO_COLOR is set.
std::string green(const std::string& text);
std::string red(const std::string& text);
std::string yellow(const std::string& text);

/// Terminal columns of UTF-8 text without its colour codes.
std::size_t width_of(const std::string& text);

/// A text table with two spaces between columns. A heading that begins with '>' aligns its column
/// to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> headings);
  void add(std::vector<std::string> cells);
  std::string text() const;
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<std::string> headings_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

/// "1.23 us", "45.6 ms": three significant digits.
std::string duration(double us);
/// Microseconds without a unit: "5.66", "1234.5", "48529".
std::string microseconds(double value);
/// "0.19", "3.4e-05"; exact 0 is "0".
std::string number(double value);

/// Progress on standard error: a bar on a terminal, else a line every ten seconds. Not thread-safe.
class Progress {
 public:
  Progress(std::string unit, std::int64_t total, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::int64_t done, std::int64_t failures, double elapsed_s);
  void set_total(std::int64_t total) { total_ = total; }
  /// Removes the bar before other output.
  void clear();

 private:
  std::string unit_;
  std::int64_t total_;
  bool terminal_, quiet_, shown_ = false;
  double last_s_ = 0;
};

/// Prints "flashcore: MESSAGE" to standard error.
void say(const std::string& message);

}  // namespace flashcore::tool
