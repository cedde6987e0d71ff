// Options shared by several commands.
#pragma once

#include <CLI/CLI.hpp>

#include "cli/args.h"

namespace flashcore::tool {

void add_device_options(CLI::App& command, DeviceArgs& args);
void add_case_options(CLI::App& command, SelectionArgs& args);
void add_control_options(CLI::App& command, RunControlArgs& args);
void add_splits_option(CLI::App& command, std::optional<int>& splits);
/// `unit` is the work that the deadline limits, "a problem".
void add_deadline_option(CLI::App& command, std::optional<double>& deadline_s,
                         const std::string& unit, const std::string& default_limit);
void add_page_size_option(CLI::App& command, std::int64_t& page_size);

/// Ranks, scheme and links of a distributed problem.
void add_ranks_options(CLI::App& command, RanksArgs& args);

/// Sizes, dtype and the options of the library. With `files`, tensor options may name files.
void add_problem_options(CLI::App& command, ProblemArgs& args, bool files);

}  // namespace flashcore::tool
