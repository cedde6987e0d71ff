// Arguments of the commands, as plain data. command_line.cc fills them in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashcore/problem.h"

namespace flashcore::tool {

struct DeviceArgs {
  std::string device = "auto";  ///< auto, cpu, cuda, cuda:N; check: also all
  std::string plan_for;         ///< named device to plan for; empty: the device itself
  int threads = 0;              ///< CPU threads; 0: all
};

/// Selected cases of bench/cases.json and selected kernels.
struct SelectionArgs {
  std::string file;  ///< empty: bench/cases.json here, else the built-in copy
  std::vector<std::string> suites;
  std::vector<std::string> cases;
  std::string kernel;  ///< regular expression; empty: the planner's choice (check: all)
};

/// Random inputs and time limits.
struct RunControlArgs {
  std::uint64_t seed = 1;
  std::optional<double> sigma;
  std::optional<int> splits;
  std::int64_t page_size = 0;  ///< keys per shuffled page; 0: contiguous K and V
  double time_limit_s = 0;
  std::optional<double> deadline_s;  ///< per problem; 0: none; absent: the default
};

/// One problem by its sizes and options. A tensor option is empty, "random" or a .npy file.
struct ProblemArgs {
  std::string shape;
  std::optional<std::int64_t> batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_dim;
  std::string dtype;
  std::string kv_dtype;         ///< 8-bit k and v with a wider q; empty: dtype
  std::string scales = "head";  ///< 8-bit tensors: none, tensor, head or block
  std::int64_t scale_block = 64;
  std::string layout = "bhsd";
  Options options;  ///< except the window and reproducibility below
  std::string window;
  std::string bias, mask, alibi, sinks;
  std::string cu_seqlens_q, cu_seqlens_k, used_k, q_start, k_start;
  bool lse = false, out_f32 = false;
  std::string reproducibility = "deterministic";
};

struct InfoArgs {
  bool kernels = false, peak = false, json = false;
  std::string tree;
};

struct RunArgs {
  DeviceArgs device;
  SelectionArgs selection;
  RunControlArgs control;
  ProblemArgs problem;
  std::string q, k, v;       ///< .npy files: all or none
  std::string block_table;   ///< .npy file; k and v are then pages
  std::string out, lse_out;  ///< .npy files to write
  int samples = 10;          ///< timing samples; 0: do not time
  std::string stage;         ///< check this stage, or all; empty: check the result
  std::string trace;         ///< "b,h,row": print this row tile by tile
  bool json = false;
  std::string program, command;  ///< argv[0]; the whole command line
};

/// One attention over several ranks.
struct RanksArgs {
  std::int32_t ranks = 0;  ///< 0: one device
  std::int32_t node = 8;   ///< ranks per machine
  std::int32_t head_ranks = 0;
  bool decode = false, by_heads = false;
  std::string documents;  ///< "0,100,250": first rows, then the length
  std::string scheme = "auto", sharding = "zigzag";
  std::string link = "nvlink", net = "infiniband";  ///< a name, or bytes per second
};

struct ExplainArgs {
  DeviceArgs device;
  SelectionArgs selection;
  ProblemArgs problem;
  RanksArgs ranks;
  std::optional<int> splits;
  std::int64_t page_size = 0;
  bool json = false;
};

struct CheckArgs {
  DeviceArgs device{.device = "all", .plan_for = {}, .threads = 0};
  SelectionArgs selection;
  RunControlArgs control;
  std::string op = "forward";  ///< or backward
  std::string suite;  ///< random, tuning, all or a suite of the file; empty: random, or --case
  std::int64_t problems = 2000;
  std::optional<std::uint64_t> index;  ///< only this problem
  std::vector<int> blocks;             ///< CTA limits, one drawn per problem; 0: no limit
  double work = 1 << 20;
  int jobs = 0;  ///< 0: one per CPU
  std::int64_t max_failures = 0;
  std::optional<std::int64_t> require_coverage;
  bool quiet = false, json = false;
  std::string program;  ///< argv[0], for the replay line
};

struct BenchArgs {
  DeviceArgs device;
  SelectionArgs selection;
  RunControlArgs control;
  int samples = 20;
  std::string output, compare, results;
  bool fail_on_slower = false, list = false, quiet = false, json = false;
  std::string program;  ///< argv[0]
  std::string command;  ///< the whole command line, for the result file
};

struct QuantizeArgs {
  DeviceArgs device;
  std::string in, shape;  ///< .npy file, or the shape of random data
  std::string from_dtype = "f16", dtype = "e4m3", per = "head";
  std::int64_t block_rows = 64;
  bool rotate = false;
  std::string out, scale_out;  ///< .npy files to write
  std::uint64_t seed = 1;
  int samples = 10;
  bool json = false;
};

struct VerifyArgs {
  DeviceArgs device;
  std::string kernel;           ///< regular expression; empty: all
  std::string op = "forward";   ///< or "backward": which of our kernels
  std::string library, symbol;  ///< verify this function instead of our kernels
  std::vector<std::string> dtypes;
  std::vector<std::int64_t> head_dims;
  std::string out_dtype, arithmetic, layout = "bhsd", only, causal_alignment, lse_base = "e", html;
  std::uint64_t seed = 1;
  std::optional<double> deadline_s;  ///< per call; 0: none; absent: the default
  bool quick = false, compact = false, quiet = false, json = false;
  bool serve = false;  ///< run as the child process that makes the calls
};

}  // namespace flashcore::tool
