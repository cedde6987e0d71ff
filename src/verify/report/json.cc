// The report as JSON.
#include <cmath>
#include <cstdio>

#include "verify/inputs/decimal.h"
#include "verify/report/report.h"

namespace flashcore {
namespace {

using verify::json_text;
using verify::status_name;

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

}  // namespace

namespace verify {

const char* status_name(ProbeResult::Status status) {
  switch (status) {
    case ProbeResult::Status::passed: return "passed";
    case ProbeResult::Status::failed: return "failed";
    default: return "not probed";
  }
}

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
         ", \"asks\": " + json_text(p.asks) + ", \"status\": " + json_text(status_name(p.status)) +
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

}  // namespace flashcore
