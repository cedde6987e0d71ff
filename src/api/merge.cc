// merge(): checks the tensors, fills the launch arguments, launches the combine step.
#include <cstdint>
#include <span>
#include <vector>

#include "api/guarded.h"
#include "api/validate/problem.h"
#include "backend/backend.h"
#include "core/combine.h"
#include "core/error.h"

namespace flashcore {
namespace {

// Varlen tensors are a batch of one: out [total_q, q_heads, v_dim], lse [q_heads, total_q].

core::Strides out_strides_of(const TensorView& t) noexcept {
  if (t.rank == 3) return {0, t.strides[1], t.strides[0], t.strides[2]};
  return {t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
}

core::Strides lse_strides_of(const TensorView& t, bool varlen) noexcept {
  if (varlen) return {0, t.strides[0], t.strides[1], 0};
  return {t.strides[0], t.strides[1], t.strides[2], 0};
}

/// `long_table` holds the parts if there are too many for the table of the params.
core::CombineParams make_merge_params(std::span<const PartialResult> parts, const TensorView& out,
                                      const TensorView& lse, const TensorView& sinks,
                                      std::vector<core::PartialResult>& long_table) {
  const bool varlen = out.rank == 3;
  core::CombineParams c{};
  c.parts = static_cast<std::int32_t>(parts.size());
  core::PartialResult* table = c.table;
  if (c.parts > core::kMaxCombineTable) {
    long_table.resize(parts.size());
    c.long_table = table = long_table.data();
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    table[i] = {parts[i].out.data, parts[i].lse.data, out_strides_of(parts[i].out),
                lse_strides_of(parts[i].lse, varlen)};
  }
  c.batch = varlen ? 1 : static_cast<std::int32_t>(out.shape[0]);
  c.q_heads = static_cast<std::int32_t>(out.shape[1]);
  c.rows = static_cast<std::int32_t>(out.shape[varlen ? 0 : 2]);
  c.v_dim = static_cast<std::int32_t>(out.shape[out.rank - 1]);
  c.out = out.data;
  c.lse = lse.data;
  c.out_strides = out_strides_of(out);
  c.lse_strides = lse_strides_of(lse, varlen);
  c.out_element = element_of(out.dtype);
  c.sinks = static_cast<const float*>(sinks.data);
  c.sinks_stride = sinks.strides[0];
  return c;
}

}  // namespace

Status merge(std::span<const PartialResult> parts, TensorView out, TensorView lse, TensorView sinks,
             Stream stream, const std::int32_t* cancel) noexcept {
  return guarded([&]() -> Status {
    FLASHCORE_RETURN_IF_ERROR(check_merge(parts, out, lse, sinks));
    const Result<const Backend*> backend = backend_for(out.device.type);
    if (!backend.ok()) return backend.status();
    std::vector<core::PartialResult> long_table;
    const core::CombineParams params = make_merge_params(parts, out, lse, sinks, long_table);
    if (params.batch == 0 || params.q_heads == 0 || params.rows == 0 || params.v_dim == 0) {
      return {};
    }
    FLASHCORE_RETURN_IF_ERROR(check_cancel(cancel));
    return (*backend)->combine(params, parts[0].out.dtype, out.device, 0, stream, cancel);
  });
}

}  // namespace flashcore
