// The bytes that each rank sends in each step.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/job.h"

namespace flashcore::distributed {

/// All ranks; of many, the first, the middle and the last stand for all.
std::vector<std::int32_t> sampled_ranks(std::int32_t ranks);

/// The plan of distributed_decode(). Its backward costs are empty.
Result<DistributedPlan> plan_decode(const DistributedProblem& problem, const ClusterSpeeds& speeds);
Result<std::vector<SentBytes>> decode_traffic(const DistributedProblem& problem);

std::vector<SentBytes> traffic(const Job& job, std::int32_t rank, bool backward);

}  // namespace flashcore::distributed
