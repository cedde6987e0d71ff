// Options that several subcommands share.
#pragma once

#include <CLI/CLI.hpp>

#include "cli/args.h"

namespace flashcore::tool {

void add_device_options(CLI::App& command, DeviceArgs& args);
void add_case_options(CLI::App& command, SelectionArgs& args);
void add_control_options(CLI::App& command, RunControlArgs& args);
void add_splits_option(CLI::App& command, std::optional<int>& splits);
/// `what` is limited by the deadline; `usual` describes the default.
void add_deadline_option(CLI::App& command, std::optional<double>& deadline_s, const char* what,
                         const char* usual);
void add_page_size_option(CLI::App& command, std::int64_t& page_size);

/// Sizes, dtype and the options of the library. `files`: tensor options may name files.
void add_problem_options(CLI::App& command, ProblemArgs& args, bool files);

}  // namespace flashcore::tool
