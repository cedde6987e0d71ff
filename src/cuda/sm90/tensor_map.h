// Tensor maps: the descriptors through which TMA reads Q, K and V.
#pragma once

#include <cuda.h>

#include "core/params.h"
#include "flashcore/status.h"
#include "flashcore/types.h"

namespace flashcore::cuda {

/// Extents of a tensor.
struct MapShape {
  std::int64_t columns, rows, heads, batch;
};

/// Extents of one TMA load: rows of each of some heads, one head after the other.
struct MapBox {
  int rows, heads = 1;
};

/// Encodes the map of a tensor of 16-bit or 8-bit elements. Its boxes are panels
/// (core/wgmma_layout.h) of box.rows * box.heads rows. Errors call the tensor `name`.
Status make_tensor_map(CUtensorMap& map, void* data, DType dtype, const core::Strides& strides,
                       const MapShape& shape, const MapBox& box, const char* name) noexcept;

}  // namespace flashcore::cuda
