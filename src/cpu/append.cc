#include "cpu/append.h"

#include <cstring>

namespace flashcore::cpu {
namespace {

core::ErrorSlot first_fault(const core::AppendParams& p) noexcept {
  for (std::int32_t b = 0; b < p.batch; ++b) {
    const core::AppendRange range = core::append_range(p, b);
    if (range.error.code != 0) return range.error;
    if (p.pages.table == nullptr || range.count == 0) continue;
    const std::int32_t last = p.pages.slot_of(range.used + range.count - 1);
    for (std::int32_t slot = p.pages.slot_of(range.used); slot <= last; ++slot) {
      const core::ErrorSlot found = core::page_error(p.pages, b, slot);
      if (found.code != 0) return found;
    }
  }
  return {};
}

void copy_row(const core::AppendTensor& t, const core::AppendRow& row, std::size_t size) noexcept {
  const char* from =
      static_cast<const char*>(t.from) +
      core::row_offset(t.from_strides, row.from, row.head) * static_cast<std::int64_t>(size);
  char* to = static_cast<char*>(t.to) +
             core::row_offset(t.to_strides, row.to, row.head) * static_cast<std::int64_t>(size);
  if (t.from_strides.column == 1 && t.to_strides.column == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(t.columns) * size);
    return;
  }
  const auto bytes = static_cast<std::int64_t>(size);
  for (std::int32_t c = 0; c < t.columns; ++c) {
    std::memcpy(to + c * t.to_strides.column * bytes, from + c * t.from_strides.column * bytes,
                size);
  }
}

}  // namespace

core::ErrorSlot append(const core::AppendParams& params) noexcept {
  const core::ErrorSlot fault = first_fault(params);
  if (fault.code != 0) return fault;
  const std::int64_t rows = core::append_rows(params);
  const auto size = static_cast<std::size_t>(params.element_bytes);
  for (std::int64_t index = 0; index < rows; ++index) {
    const core::AppendRow row = core::append_row(params, index);
    if (row.skipped) continue;  // a packed row that belongs to no sequence
    copy_row(params.k, row, size);
    copy_row(params.v, row, size);
  }
  return {};
}

}  // namespace flashcore::cpu
