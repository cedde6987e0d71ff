// Gradients on the CPU: the steps of a call on the thread pool.
#pragma once

#include "backend/backend.h"

namespace flashcore::cpu {

Status run_backward(const BackwardPlan& plan, const core::BackwardParams& params,
                    const std::int32_t* cancel) noexcept;

}  // namespace flashcore::cpu
