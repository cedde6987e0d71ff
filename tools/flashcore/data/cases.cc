#include "data/cases.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/text.h"
#include "command_error.h"
#include "data/npy.h"
#include "data/problem.h"
#include "generated/cases_json.h"  // bench/cases.json at build time

namespace flashcore::tool {
namespace {

constexpr const char* kDefaultFile = "bench/cases.json";
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 30;

std::string pair_text(std::int64_t first, std::int64_t second) {
  return first == second ? formatted("{}", first) : formatted("{}/{}", first, second);
}

void read_options(const Json& options, BenchCase& c) {
  for (const auto& [name, value] : options.items()) {
    if (name == "softcap") {
      value.get_to(c.softcap);
    } else if (name == "alibi") {
      value.get_to(c.alibi);
    } else if (name == "bias") {
      value.get_to(c.bias);
    } else if (name == "batch_invariant") {
      value.get_to(c.batch_invariant);
    } else if (name == "f32_out") {
      value.get_to(c.out_f32);
    } else if (name == "mask" && value == "random") {
      c.random_mask = true;
    } else {
      c.other_option = name;
    }
  }
}

BenchCase case_of(const Json& row) {
  BenchCase c;
  c.fields = std::make_shared<const Json>(row);
  row.at("kind").get_to(c.kind);
  row.at("suite").get_to(c.suite);
  row.at("name").get_to(c.name);
  row.at("dtype").get_to(c.dtype);
  for (const auto& [name, extent] : {std::pair{"batch", &c.batch},
                                     {"q_heads", &c.q_heads},
                                     {"kv_heads", &c.kv_heads},
                                     {"q_len", &c.q_len},
                                     {"kv_len", &c.kv_len},
                                     {"head_dim", &c.head_dim}}) {
    row.at(name).get_to(*extent);
    if (*extent < 1 || *extent > kMaxExtent) {
      throw CommandError(formatted("{} is {}; wanted 1 to {}", name, *extent, kMaxExtent));
    }
  }
  row.at("causal").get_to(c.causal);
  row.at("cold_l2").get_to(c.cold_l2);
  c.ragged = row.contains("used_k") || row.contains("packed");
  c.window = row.value("window", std::int64_t{-1});
  c.v_dim = row.value("v_dim", c.head_dim);
  c.page_size = row.value("page_size", std::int64_t{0});
  if (row.contains("options")) read_options(row.at("options"), c);
  c.needs = row.value("requires", "");
  c.part = row.value("part", "");
  c.earlier_error = row.value("earlier_error", "");
  return c;
}

/// Distinct values of a field, in order of appearance.
template <typename Field>
std::string known(const std::vector<BenchCase>& cases, Field field) {
  std::vector<std::string> values;
  for (const BenchCase& c : cases) {
    if (std::find(values.begin(), values.end(), field(c)) == values.end()) {
      values.push_back(field(c));
    }
  }
  return joined(values);
}

template <typename Matches>
void require_known(const std::vector<BenchCase>& cases, const std::vector<std::string>& wanted,
                   Matches matches, const char* what, const std::string& known_values) {
  for (const std::string& name : wanted) {
    if (std::none_of(cases.begin(), cases.end(),
                     [&](const BenchCase& c) { return matches(c, name); })) {
      throw CommandError(formatted("unknown {} \"{}\"; known: {}", what, name, known_values));
    }
  }
}

bool in_suite(const BenchCase& c, const std::string& suite) {
  return c.suite == current_suite(suite);
}
bool has_name(const BenchCase& c, const std::string& name) {
  return c.name == name || c.label() == name;
}

}  // namespace

std::string current_suite(const std::string& name) {
  return name == "lineage" ? kRegressionSuite : name;
}

std::string BenchCase::label() const { return formatted("{}#{}", name, ordinal); }

std::string BenchCase::shape() const {
  return formatted("({},{},{},{})", batch, pair_text(q_heads, kv_heads), pair_text(q_len, kv_len),
                   pair_text(head_dim, v_dim));
}

std::vector<BenchCase> parse_cases(const std::string& text, const std::string& name) {
  std::vector<BenchCase> cases;
  std::map<std::string, int> seen;
  try {
    const Json document = Json::parse(text);
    for (const Json& row : document.at("cases")) {
      cases.push_back(case_of(row));
      cases.back().ordinal = ++seen[cases.back().name];
    }
  } catch (const Json::exception& error) {
    throw CommandError(formatted("{}: case {}: {}", name, cases.size() + 1, error.what()));
  } catch (const CommandError& error) {
    throw CommandError(formatted("{}: case {}: {}", name, cases.size() + 1, error.what()));
  }
  return cases;
}

std::vector<BenchCase> load_cases(const std::string& file) {
  if (file.empty() && !std::filesystem::exists(kDefaultFile)) {
    return parse_cases(kCasesJson, "built-in cases");
  }
  const std::string path = file.empty() ? kDefaultFile : file;
  const std::vector<std::byte> bytes = read_file(path);
  return parse_cases(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), path);
}

std::vector<BenchCase> select_cases(const std::vector<BenchCase>& cases,
                                    const std::vector<std::string>& suites,
                                    const std::vector<std::string>& names) {
  require_known(cases, suites, in_suite, "suite", known(cases, [](auto& c) { return c.suite; }));
  std::vector<BenchCase> selected;
  for (const BenchCase& c : cases) {
    if (!suites.empty() && std::none_of(suites.begin(), suites.end(),
                                        [&](const std::string& s) { return in_suite(c, s); })) {
      continue;
    }
    selected.push_back(c);
  }
  require_known(selected, names, has_name, "case", known(selected, [](auto& c) { return c.name; }));
  std::erase_if(selected, [&](const BenchCase& c) {
    return !names.empty() && std::none_of(names.begin(), names.end(),
                                          [&](const std::string& n) { return has_name(c, n); });
  });
  return selected;
}

std::string why_not(const BenchCase& c) {
  const auto by_python = [](const std::string& what) {
    return formatted("{}: timed by python3 -m flashcore.bench", what);
  };
  if (c.kind == "bwd") return by_python("gradients");
  if (c.kind != "fwd") return formatted("{}: wanted fwd or bwd", c.kind);
  if (c.ragged) return by_python("variable lengths");
  if (!c.other_option.empty()) return by_python("option " + c.other_option);
  if (!c.needs.empty() && c.needs != "pages") return by_python(c.needs);
  return {};
}

verify::CaseSpec spec_of(const BenchCase& c, const RunControlArgs& control) {
  verify::CaseSpec spec;
  set_dtype(c.dtype, spec);
  spec.batch = c.batch;
  spec.q_heads = c.q_heads;
  spec.kv_heads = c.kv_heads;
  spec.q_len = c.q_len;
  spec.kv_len = c.kv_len;
  spec.head_dim = c.head_dim;
  spec.v_dim = c.v_dim;
  spec.options.causal = c.causal;
  spec.options.window_left = c.window;
  spec.options.softcap = c.softcap;
  if (c.batch_invariant) spec.options.reproducibility = Reproducibility::batch_invariant;
  spec.out_f32 = c.out_f32;
  spec.alibi = c.alibi ? 1 : 0;
  spec.bias.given = spec.bias.per_query = c.bias;
  spec.mask.given = spec.mask.per_query = c.random_mask;
  spec.options.num_splits = control.splits.value_or(0);
  spec.sigma = control.sigma.value_or(1.0);
  spec.seed = control.seed;
  put_in_pages(spec, control.page_size > 0 ? control.page_size : c.page_size);
  return spec;
}

void set_dtype(const std::string& name, verify::CaseSpec& spec) {
  const std::size_t slash = name.find('/');
  const DType q = dtype_named(name.substr(0, slash));
  const DType kv = slash == std::string::npos ? q : dtype_named(name.substr(slash + 1));
  if (kv != q && !is_8bit(kv)) {
    throw CommandError(formatted("dtype is \"{}\"; wanted an 8-bit type after the slash", name));
  }
  spec.dtype = is_8bit(q) ? DType::f16 : q;
  if (is_8bit(q)) {
    spec.q_storage = q;
    spec.q_scale = verify::ScaleKind::per_head;
  }
  if (is_8bit(kv)) {
    spec.k_storage = spec.v_storage = kv;
    spec.k_scale = spec.v_scale = verify::ScaleKind::per_head;
  }
}

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::e4m3,
                            DType::e5m2, DType::int8, DType::u8}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw CommandError(
      formatted("dtype is \"{}\"; wanted f64, f32, f16, bf16, e4m3, e5m2, int8 or byte", name));
}

std::string shape_text(const verify::CaseSpec& s) {
  return formatted("{},{},{},{}", s.batch, pair_text(s.q_heads, s.kv_heads),
                   pair_text(s.q_len, s.kv_len), pair_text(s.head_dim, s.v_dim));
}

}  // namespace flashcore::tool
