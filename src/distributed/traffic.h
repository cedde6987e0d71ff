// The bytes that each rank sends in each step.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/job.h"

namespace flashcore::distributed {

std::vector<SentBytes> traffic(const Job& job, std::int32_t rank, bool backward);

}  // namespace flashcore::distributed
