// The report as one self-contained HTML page: verdict, probes, and maps of the errors.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/report/report.h"

namespace flashcore {
namespace {

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '&': result += "&amp;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

constexpr const char* kStyle = R"css(
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.right { color: #17692b; } .wrong { color: #a61b1b; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2rem .6rem;
       border-bottom: 1px solid #ddd; vertical-align: top; } th { font-weight: 600; }
.failed { color: #a61b1b; font-weight: 600; } .passed { color: #17692b; } .not { color: #777; }
canvas { image-rendering: pixelated; border: 1px solid #bbb; max-width: 100%; }
.pair { display: flex; gap: 1.5rem; flex-wrap: wrap; } figure { margin: 0; }
figcaption { color: #555; font-size: .85rem; } pre { background: #f5f5f5; padding: .6rem;
       overflow-x: auto; white-space: pre-wrap; }
)css";

/// Draws the JSON on canvases, so that the page loads nothing.
constexpr const char* kScript = R"js(
const report = JSON.parse(document.getElementById('report').textContent), e = report.evidence;
const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));
// White within the bound, then yellow to dark red over six decades.
const heat = r => r === null ? [60, 0, 60] : r <= 1 ? mix([255,255,255], [215,235,215], r)
  : mix([255,215,90], [120,0,0], Math.min(1, Math.log10(r) / 6));
function grid(id, rows, columns, color, size) {
  const c = document.getElementById(id); if (!c || !rows || !columns) return;
  c.width = columns * size; c.height = rows * size;
  const g = c.getContext('2d');
  for (let i = 0; i < rows; ++i) for (let j = 0; j < columns; ++j) {
    g.fillStyle = `rgb(${color(i, j)})`; g.fillRect(j * size, i * size, size, size); }
}
const cell = n => Math.max(2, Math.min(14, Math.floor(800 / Math.max(n, 1))));
grid('rows', e.heads, e.rows, (i, j) => heat(e.error[i * e.rows + j]), cell(e.rows));
const n = e.by_column.length;
grid('columns', 1, n, (i, j) => heat(e.by_column[j]), cell(n));
const all = e.p_got.concat(e.p_want).filter(x => x !== null);
const low = Math.min(0, ...all), high = Math.max(1e-30, ...e.p_want.filter(x => x !== null));
const value = x => x === null ? [200, 0, 200]
  : mix([255,255,255], [20,60,140], Math.max(0, Math.min(1, (x - low) / (high - low))));
for (const [id, p] of [['got', e.p_got], ['want', e.p_want]])
  grid(id, e.p_rows, e.p_columns, (i, j) => value(p[i * e.p_columns + j]), cell(2 * e.p_columns));
)js";

std::string list(const char* title, const std::vector<std::string>& items) {
  if (items.empty()) return "";
  std::string text = std::string("<h2>") + title + "</h2>\n<ul>\n";
  for (const std::string& item : items) text += "<li>" + escaped(item) + "</li>\n";
  return text + "</ul>\n";
}

std::string figures(const Evidence& e) {
  if (e.heads == 0) return "";
  const std::string columns = e.columns_are_keys ? "key position" : "output column";
  return "<h2>Location of the errors</h2>\n<p>" + escaped(e.title) +
         ". Pale green: within the rounding bound; yellow to dark red: above it, up to a million "
         "times; purple: not a number.</p>\n"
         "<figure><canvas id=\"rows\"></canvas><figcaption>heads (down) × query rows "
         "(across)</figcaption></figure>\n"
         "<figure><canvas id=\"columns\"></canvas><figcaption>error by " +
         columns + "</figcaption></figure>\n<h2>" +
         (e.columns_are_keys ? "Scores read back from P" : "Output (with one-hot V: P)") +
         "</h2>\n<div class=\"pair\"><figure><canvas id=\"got\"></canvas><figcaption>result of the "
         "worst head</figcaption></figure><figure><canvas id=\"want\"></canvas>"
         "<figcaption>expected</figcaption></figure></div>\n";
}

}  // namespace

std::string to_html(const VerifyReport& r) {
  std::string h = "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>" +
                  escaped(r.name) + ": " + (r.ok ? "correct" : to_string(r.stage)) +
                  "</title>\n<style>" + kStyle + "</style>\n<h1>" + escaped(r.name) + " (" +
                  escaped(r.dtype) + "): ";
  if (r.ok) {
    h += "<span class=\"right\">correct, as far as it was probed</span></h1>\n";
  } else {
    h += "<span class=\"wrong\">wrong, first at stage " + std::string(to_string(r.stage)) +
         "</span></h1>\n<p>" + escaped(r.detail) + "</p>\n<pre>" + escaped(r.call) + "\n" +
         escaped(r.reproducer) + "</pre>\n";
  }
  h += figures(r.evidence);
  h += "<h2>Probes</h2>\n<table>\n<tr><th>probe<th>result<th>calls<th>question\n";
  for (const ProbeResult& p : r.probes) {
    const bool failed = p.status == ProbeResult::Status::failed;
    const bool passed = p.status == ProbeResult::Status::passed;
    h += "<tr><td>" + p.name + "<td class=\"" +
         (failed   ? "failed"
          : passed ? "passed"
                   : "not") +
         "\">" +
         (failed   ? "failed"
          : passed ? "passed"
                   : "not probed") +
         "<td>" + verify::decimal(p.calls) + "<td>" +
         escaped(passed || failed ? p.asks : p.detail) + "\n";
  }
  h += "</table>\n" + list("Supports", r.capabilities) + list("Conventions", r.conventions) +
       list("Not probed", r.not_probed);
  // "</" would end the script element.
  std::string json = to_json(r);
  for (std::size_t at = 0; (at = json.find("</", at)) != std::string::npos; at += 3) {
    json.replace(at, 2, "<\\/");
  }
  return h + "<script type=\"application/json\" id=\"report\">" + json + "</script>\n<script>" +
         kScript + "</script>\n</html>\n";
}

}  // namespace flashcore
