// The cases of bench/cases.json.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/args.h"
#include "verify/inputs/case.h"

namespace flashcore::tool {

using Json = nlohmann::ordered_json;

/// Shapes at which earlier kernels failed.
inline constexpr const char* kRegressionSuite = "regression";

/// Maps the old name of a suite to the current one; "lineage" is the old name of "regression".
std::string current_suite(const std::string& name);

struct BenchCase {
  std::shared_ptr<const Json> fields;  ///< as in the file; a result row repeats them
  std::string kind, suite, name, dtype;
  int ordinal = 1;  ///< among the cases of that name: --case NAME#2 is the second
  std::int64_t batch = 0, q_heads = 0, kv_heads = 0, q_len = 0, kv_len = 0, head_dim = 0;
  std::int64_t v_dim = 0;
  std::int64_t window = -1;  ///< keys a query sees before its own; -1: all
  bool causal = false, cold_l2 = false;
  std::int64_t page_size = 0;
  double softcap = 0;
  bool alibi = false, bias = false,
       random_mask = false;  ///< bias and mask are [1, 1, q_len, kv_len]
  bool batch_invariant = false, out_f32 = false;
  bool ragged = false;              ///< the file gives a length per sequence: used_k or packed
  std::string other_option;         ///< an option that only the Python benchmark has
  std::string needs;                ///< another requirement, e.g. "pages"
  std::string part, earlier_error;  ///< suite regression: earlier kernel, its error

  /// NAME#2
  std::string label() const;
  /// (1,32/8,1/8192,128), as --shape takes it
  std::string shape() const;
};

/// --cases FILE, else bench/cases.json in the working directory, else the built-in copy.
std::vector<BenchCase> load_cases(const std::string& file);

/// Parses the text of a cases file; `name` is for messages. Throws CommandError.
std::vector<BenchCase> parse_cases(const std::string& text, const std::string& name);

/// Selects cases by suite (empty: all) and name (NAME or NAME#2; empty: all). The error for an
/// unknown suite or name lists the known ones.
std::vector<BenchCase> select_cases(const std::vector<BenchCase>& cases,
                                    const std::vector<std::string>& suites,
                                    const std::vector<std::string>& names);

/// The reason why this build cannot run the case; empty if it can.
std::string why_not(const BenchCase& bench_case);

/// Requires a case that this build can run.
verify::CaseSpec spec_of(const BenchCase& bench_case, const RunControlArgs& control);

/// "f16"; "e4m3": 8-bit q, k and v with a scale per head, computed in f16; "f16/e4m3": k and v
/// only.
void set_dtype(const std::string& name, verify::CaseSpec& spec);

/// Accepts 8-bit types too. Throws CommandError for an unknown name.
DType dtype_named(const std::string& name);

/// "1,32/8,1/8192,128": a slash where queries and keys, or head_dim and v_dim, differ.
std::string shape_text(const verify::CaseSpec& spec);

}  // namespace flashcore::tool
