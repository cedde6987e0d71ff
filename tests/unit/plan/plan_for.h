// Plans for named devices.
#pragma once

#include "plan/devices.h"
#include "plan/planner.h"
#include "support/call.h"

namespace flashcore {

/// The plan of a dense problem with as many KV heads as query heads.
inline Result<Plan> plan_for(const char* device, DType dtype, std::int64_t batch,
                             std::int64_t heads, std::int64_t q_len, std::int64_t kv_len,
                             std::int64_t head_dim, std::int64_t v_dim,
                             const Options& options = {}) {
  const Result<DeviceInfo> info = named_device(device);
  if (!info.ok()) return info.status();
  const Result<Problem> problem = dense_problem(dtype, batch, heads, heads, q_len, kv_len, head_dim,
                                                v_dim, options, info->device);
  if (!problem.ok()) return problem.status();
  return make_plan(*problem, *info);
}

}  // namespace flashcore
