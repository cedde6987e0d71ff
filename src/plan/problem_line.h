// A problem in one line: types, sizes and options.
#pragma once

#include <string>

#include "flashcore/problem.h"

namespace flashcore {

std::string problem_line(const Problem& problem);

}  // namespace flashcore
