#include "check/check_report.h"

#include <algorithm>
#include <cmath>

#include "cli/json_output.h"
#include "cli/terminal.h"
#include "cli/text.h"

namespace flashcore::tool {
namespace {

constexpr std::size_t kNamesShown = 6;

std::string first_names(const std::vector<std::string>& names) {
  const std::size_t shown = std::min(names.size(), kNamesShown);
  std::string text = joined({names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown)});
  if (shown < names.size()) text += formatted(" and {} more", names.size() - shown);
  return text;
}

/// error / bound, which a wrong result can make very large.
std::string share(double ratio) {
  return ratio < 1000 ? formatted("{:.2f}", ratio) : formatted("{:.0e}", ratio);
}

std::string error_cell(const CaseRow& row, const char* dtype) {
  const auto found = row.errors.find(dtype);
  if (found == row.errors.end()) return "-";
  return std::isnan(found->second) ? "NaN" : formatted("{:.1e}", found->second);
}

std::string verdict(const CaseRow& row) {
  if (row.problems == 0) return "not run";
  return row.failures == 0 ? green("ok") : red("FAILED");
}

}  // namespace

void print_failure(const Failure& f) {
  print_out("{}  problem {} of suite {}, kernel {}\n  {}\n", red("FAILED"), f.index, f.suite,
            f.kernel, f.problem);
  print_out("{}", f.report.empty() ? formatted("  {}\n", f.reason) : f.report);
  print_out("  replay     {}\n\n", f.replay);
  std::fflush(stdout);
}

Json to_json(const Failure& f) {
  Json json = {{"suite", f.suite},     {"index", f.index},   {"kernel", f.kernel},
               {"problem", f.problem}, {"reason", f.reason}, {"replay", f.replay}};
  if (f.hung) json["hung"] = true;
  if (!f.comparison.empty()) json["comparison"] = Json::parse(f.comparison);
  return json;
}

std::string kernel_table(const CheckTotals& totals) {
  Table table({"kernel", ">problems", ">failed", ">worst error/bound", ">at index"});
  for (const KernelInfo& kernel : kernels()) {
    const auto found = totals.kernels.find(kernel.id);
    if (found == totals.kernels.end()) continue;
    const KernelTally& t = found->second;
    table.add({kernel.id, formatted("{}", t.problems),
               t.failures > 0 ? red(formatted("{}", t.failures)) : "0", share(t.worst_ratio),
               formatted("{}", t.worst_index)});
  }
  return table.text();
}

void print_coverage(const verify::Coverage& coverage) {
  print_out("\ncoverage\n  kernels     {}, each with {} problems or more\n",
            coverage.per_kernel().size(), coverage.fewest_per_kernel());
  const auto line = [](const char* name, const verify::Covered& c, const char* what) {
    print_out("  {:11} {} of {} {}{}\n", name, c.covered, c.possible, what,
              c.missing.empty() ? "" : yellow("; missing: " + first_names(c.missing)));
  };
  line("options", coverage.options(), "alone");
  line("pairs", coverage.option_pairs(), "pairs of compatible options");
  line("tile edges", coverage.tile_edges(),
       "(kernel, tile, one less / exact / one more) of query rows and keys");
  if (const verify::Covered lists = coverage.work_lists(); lists.possible > 0) {
    line("work lists", lists, "(persistent kernel, sequence of tiles of one CTA)");
  }
}

Json to_json(const verify::Coverage& coverage) {
  const auto part = [](const verify::Covered& c) {
    return Json{{"covered", c.covered}, {"possible", c.possible}, {"missing", c.missing}};
  };
  return {{"fewest_per_kernel", coverage.fewest_per_kernel()},
          {"options", part(coverage.options())},
          {"pairs", part(coverage.option_pairs())},
          {"tile_edges", part(coverage.tile_edges())},
          {"work_lists", part(coverage.work_lists())}};
}

std::string missing_coverage(const verify::Coverage& coverage, std::int64_t per_kernel) {
  if (coverage.fewest_per_kernel() < per_kernel) {
    return formatted("a kernel has {} problems; {} are required", coverage.fewest_per_kernel(),
                     per_kernel);
  }
  for (const verify::Covered& c : {coverage.options(), coverage.option_pairs(),
                                   coverage.tile_edges(), coverage.work_lists()}) {
    if (!c.missing.empty()) return "not covered: " + first_names(c.missing);
  }
  return {};
}

void print_regression(const std::vector<CaseRow>& rows) {
  Table table({"earlier", "shape", "mask", "its error", ">f16", ">bf16", ">f32", ">splits",
               ">bound", "check"});
  const bool one_device = rows.front().device == rows.back().device;
  for (const CaseRow& row : rows) {
    const BenchCase& c = row.bench_case;
    table.add({c.part + (one_device ? "" : " " + row.device), c.shape(), c.causal ? "causal" : "",
               c.earlier_error, error_cell(row, "f16"), error_cell(row, "bf16"),
               error_cell(row, "f32"),
               row.most_splits > 1 ? formatted("1-{}", row.most_splits) : "1",
               share(row.worst_ratio), verdict(row)});
  }
  print_out(
      "{}\nf16, bf16, f32: largest |out - oracle| of this build, for inputs of unit variance. "
      "bound: largest\nerror / bound of an element. FP8: its shape in the dtypes above; --suite "
      "random has 8-bit inputs.\n",
      table.text());
}

void print_cases(const std::vector<CaseRow>& rows) {
  Table table({"case", "shape", "mask", "dtype", "device", ">max error", ">of bound", "check"});
  for (const CaseRow& row : rows) {
    const BenchCase& c = row.bench_case;
    table.add({c.label(), c.shape(), c.causal ? "causal" : "", c.dtype, row.device,
               error_cell(row, c.dtype.c_str()), share(row.worst_ratio),
               row.skipped.empty() ? verdict(row) : row.skipped});
  }
  print_out("{}", table.text());
}

Json to_json(const CaseRow& row) {
  Json json = *row.bench_case.fields;
  json["device"] = row.device;
  Json errors = Json::object();
  for (const auto& [dtype, error] : row.errors) errors[dtype] = tool::to_json(error);
  json["errors"] = errors;
  json["worst_ratio"] = tool::to_json(row.worst_ratio);
  json["splits"] = row.most_splits;
  json["problems"] = row.problems;
  json["failures"] = row.failures;
  if (!row.skipped.empty()) json["skipped"] = row.skipped;
  return json;
}

}  // namespace flashcore::tool
