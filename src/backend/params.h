// Makes the launch arguments of kernels from a plan and the caller's tensors. These functions copy
// pointers, strides and sizes. The plan has made all decisions.
#pragma once

#include "core/backward_params.h"
#include "core/combine.h"
#include "core/params.h"
#include "core/tile_scheduler.h"
#include "flashcore/attention.h"
#include "flashcore/backward.h"

namespace flashcore {

core::AttentionParams make_params(const Plan& plan, const Tensors& tensors,
                                  const Workspace& workspace) noexcept;

core::BackwardParams make_backward_params(const BackwardPlan& plan, const Tensors& tensors,
                                          const Gradients& gradients,
                                          const Workspace& workspace) noexcept;

/// The arguments of the kernel that combines the splits of a plan.
core::CombineParams make_combine_params(const Plan& plan,
                                        const core::AttentionParams& params) noexcept;

/// The tiles of a persistent kernel, in the order in which its CTAs fetch them.
struct WorkList {
  core::TileScheduler order;
  core::PackGqa heads;
  core::TailSplit tail;        ///< or the key ranges of every tile, if they are apart
  std::int32_t num_scheduled;  ///< tiles and tail splits
  bool tiles_from_window;      ///< plan/kernel_traits.h
};
WorkList make_work_list(const Plan& plan, const core::AttentionParams& params) noexcept;

/// The page table of paged K and V; empty if block_table is not given.
core::PageTable pages_of(std::int64_t page_size, std::int64_t pages,
                         const TensorView& block_table) noexcept;

/// The scales of an 8-bit tensor: block_rows rows per scale if `scale` has blocks; 1 if not given.
core::Scales scales_of(const TensorView& scale, const Layout& layout,
                       std::int64_t block_rows) noexcept;

}  // namespace flashcore
