// The tensor maps that TMA reads Q, K and V through, made on the host for every call.
#pragma once

#include "cuda/sm90/params.h"
#include "flashcore/plan.h"
#include "flashcore/status.h"

namespace flashcore::cuda {

/// The extents of a tensor.
struct MapShape {
  std::int64_t columns, rows, heads, batch;
};

/// What one copy takes: so many rows of so many heads, one head after the other.
struct MapBox {
  int rows, heads = 1;
};

/// The map of a tensor of 16-bit or 8-bit elements: its boxes are panels (core/wgmma_layout.h) of
/// box.rows * box.heads rows. Errors call it `name`.
Status make_tensor_map(CUtensorMap& map, void* data, DType dtype, const core::Strides& strides,
                       const MapShape& shape, const MapBox& box, const char* name) noexcept;

/// Fills in everything of a Hopper kernel's parameters, from a plan that takes one.
Status make_sm90_params(const Plan& plan, const core::AttentionParams& call,
                        sm90::Params& params) noexcept;

}  // namespace flashcore::cuda
