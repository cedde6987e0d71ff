// The report as text.
#include <cstdio>

#include "verify/inputs/decimal.h"
#include "verify/report/report.h"

namespace flashcore {
namespace {

using verify::status_name;

/// Wraps text at spaces; continuation lines are indented.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width = 100) {
  std::string result;
  std::size_t column = indent;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (column + (end - at) > width && column > indent) {
      result.append("\n").append(indent, ' ');
      column = indent;
    } else if (column > indent) {
      result += " ";
      ++column;
    }
    result += text.substr(at, end - at);
    column += end - at;
    at = end + 1;
  }
  return result;
}

}  // namespace

std::string to_text(const VerifyReport& r) {
  std::string t = r.name + " (" + r.dtype + "): ";
  if (r.ok) {
    t += "correct, as far as it was probed\n";
  } else {
    t += "WRONG, first at stage " + std::string(to_string(r.stage)) + "\n";
    t += "  finding     " + wrapped(r.detail, 14) + "\n";
    t += "  call        " + wrapped(r.call, 14) + "\n";
    t += "  reproduce   " + wrapped(r.reproducer, 14) + "\n";
  }
  t += "\n";
  for (const ProbeResult& p : r.probes) {
    char line[128];
    std::snprintf(line, sizeof line, "  %-16s %-10s %5lld calls %7.2f s  ", p.name.c_str(),
                  p.status == ProbeResult::Status::failed ? "FAILED" : status_name(p.status),
                  static_cast<long long>(p.calls), p.seconds);
    t += line +
         (p.status == ProbeResult::Status::passed   ? p.asks
          : p.status == ProbeResult::Status::failed ? p.asks
                                                    : p.detail) +
         "\n";
  }
  const auto add = [&](const char* name, const std::vector<std::string>& items) {
    std::string all;
    for (const std::string& item : items) all += (all.empty() ? "" : "; ") + item;
    if (!all.empty()) t += std::string(name) + wrapped(all, 14) + "\n";
  };
  t += "\n";
  add("  supports    ", r.capabilities);
  add("  conventions ", r.conventions);
  add("  not probed  ", r.not_probed);
  char line[96];
  std::snprintf(line, sizeof line, "  %lld calls in %.2f s, seed %llu\n",
                static_cast<long long>(r.calls), r.seconds,
                static_cast<unsigned long long>(r.seed));
  return t + line;
}

}  // namespace flashcore
