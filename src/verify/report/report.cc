// A verdict for people and for programs. The page with pictures is in report_html.cc.
#include "verify/report/report.h"
#include "verify/inputs/decimal.h"

#include <cmath>
#include <cstdio>

namespace flashcore {
namespace {

using verify::json_text;

std::string json_number(double x) {
  if (!std::isfinite(x)) return "null";
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

std::string json_list(const std::vector<std::string>& items) {
  std::string text = "[";
  for (const std::string& item : items)
    text.append(text.size() > 1 ? ", " : "").append(json_text(item));
  return text + "]";
}

std::string json_list(const std::vector<double>& items) {
  std::string text = "[";
  for (const double item : items) text.append(text.size() > 1 ? "," : "").append(json_number(item));
  return text + "]";
}

const char* name_of(ProbeResult::Status status) {
  switch (status) {
    case ProbeResult::Status::passed: return "passed";
    case ProbeResult::Status::failed: return "failed";
    default: return "not probed";
  }
}

/// Folds text at spaces to `width`, further lines indented.
std::string folded(const std::string& text, std::size_t indent, std::size_t width = 100) {
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

namespace verify {

std::string json_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += std::string("\\") + c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      quoted += code;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace verify

std::string to_json(const VerifyReport& r) {
  std::string j =
      "{\n  \"name\": " + json_text(r.name) + ",\n  \"dtype\": " + json_text(r.dtype) +
      ",\n  \"ok\": " + (r.ok ? "true" : "false") +
      ",\n  \"stage\": " + (r.ok ? "null" : json_text(to_string(r.stage))) +
      ",\n  \"detail\": " + json_text(r.detail) + ",\n  \"call\": " + json_text(r.call) +
      ",\n  \"reproducer\": " + json_text(r.reproducer) +
      ",\n  \"seed\": " + verify::decimal(r.seed) + ",\n  \"calls\": " + verify::decimal(r.calls) +
      ",\n  \"seconds\": " + json_number(r.seconds) +
      ",\n  \"fingerprint\": " + json_text(r.fingerprint) +
      ",\n  \"capabilities\": " + json_list(r.capabilities) +
      ",\n  \"conventions\": " + json_list(r.conventions) +
      ",\n  \"not_probed\": " + json_list(r.not_probed) + ",\n  \"probes\": [";
  for (std::size_t i = 0; i < r.probes.size(); ++i) {
    const ProbeResult& p = r.probes[i];
    j += std::string(i == 0 ? "" : ",") + "\n    {\"name\": " + json_text(p.name) +
         ", \"asks\": " + json_text(p.asks) + ", \"status\": " + json_text(name_of(p.status)) +
         ", \"detail\": " + json_text(p.detail) + ", \"calls\": " + verify::decimal(p.calls) +
         ", \"seconds\": " + json_number(p.seconds) + "}";
  }
  const Evidence& e = r.evidence;
  j += "\n  ],\n  \"evidence\": {\"title\": " + json_text(e.title) +
       ", \"heads\": " + verify::decimal(e.heads) + ", \"rows\": " + verify::decimal(e.rows) +
       ", \"error\": " + json_list(e.error) +
       ", \"columns\": " + (e.columns_are_keys ? "\"keys\"" : "\"columns\"") +
       ", \"by_column\": " + json_list(e.by_column) + ", \"p_rows\": " + verify::decimal(e.p_rows) +
       ", \"p_columns\": " + verify::decimal(e.p_columns) + ", \"p_got\": " + json_list(e.p_got) +
       ", \"p_want\": " + json_list(e.p_want) + "}\n}\n";
  return j;
}

std::string to_text(const VerifyReport& r) {
  std::string t = r.name + " (" + r.dtype + "): ";
  if (r.ok) {
    t += "right, as far as it was probed\n";
  } else {
    t += "WRONG, first at " + std::string(to_string(r.stage)) + "\n";
    t += "  what        " + folded(r.detail, 14) + "\n";
    t += "  call        " + folded(r.call, 14) + "\n";
    t += "  see again   " + folded(r.reproducer, 14) + "\n";
  }
  t += "\n";
  for (const ProbeResult& p : r.probes) {
    char line[128];
    std::snprintf(line, sizeof line, "  %-12s %-10s %5lld calls %7.2f s  ", p.name.c_str(),
                  p.status == ProbeResult::Status::failed ? "FAILED" : name_of(p.status),
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
    if (!all.empty()) t += std::string(name) + folded(all, 14) + "\n";
  };
  t += "\n";
  add("  can do      ", r.capabilities);
  add("  conventions ", r.conventions);
  add("  not probed  ", r.not_probed);
  char line[96];
  std::snprintf(line, sizeof line, "  %lld calls in %.2f s, seed %llu\n",
                static_cast<long long>(r.calls), r.seconds,
                static_cast<unsigned long long>(r.seed));
  return t + line;
}

}  // namespace flashcore
