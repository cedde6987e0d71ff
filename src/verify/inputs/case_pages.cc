// Pages of a case: fills the block table, and writes NaN to unused rows of pages.
#include <algorithm>
#include <limits>

#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {

void CaseMemory::assign_pages(const std::vector<std::int32_t>& lengths) {
  const CaseSpec& s = spec_;
  const TensorView& table = tensors_.block_table;
  const std::int64_t pages = tensors_.k.shape[0];
  Random random(s.seed, kPageIds);
  std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<std::int64_t>(i);
    std::swap(order[i],
              order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i) + 1))]);
  }

  // Unused entries must never be read, so they are invalid page ids.
  const double invalid_ids[] = {-1, static_cast<double>(pages),
                                static_cast<double>(std::numeric_limits<std::int32_t>::max()),
                                static_cast<double>(std::numeric_limits<std::int32_t>::min())};
  std::vector<bool> in_use(static_cast<std::size_t>(pages * s.page_size), false);
  std::size_t assigned = 0;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t slot = 0; slot < table.shape[1]; ++slot) {
      const std::int64_t keys = std::min<std::int64_t>(
          lengths[static_cast<std::size_t>(b)] - slot * s.page_size, s.page_size);
      double entry = random.pick(invalid_ids);
      if (keys > 0) {
        const bool again = s.shared_pages && assigned > 0 && random.chance(0.4);
        const std::int64_t page =
            again
                ? order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(assigned)))]
                : order[assigned++];
        for (std::int64_t row = 0; row < keys; ++row) {
          in_use[static_cast<std::size_t>(page * s.page_size + row)] = true;
        }
        entry = static_cast<double>(page);
      }
      store(bytes_.data() + reinterpret_cast<std::uintptr_t>(table.data), DType::i32,
            b * table.strides[0] + slot, entry);
    }
  }

  for (const TensorView* t : {&tensors_.k, &tensors_.v}) {
    TensorView row = *t;  // [kv_heads, dim] of one row of one page
    row.rank = 2;
    for (int axis = 0; axis < 2; ++axis) {
      row.shape[axis] = t->shape[axis + 2];
      row.strides[axis] = t->strides[axis + 2];
    }
    std::byte* data = bytes_.data() + reinterpret_cast<std::uintptr_t>(t->data);
    for (std::size_t i = 0; i < in_use.size(); ++i) {
      if (in_use[i]) continue;
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t first =
          at / s.page_size * t->strides[0] + at % s.page_size * t->strides[1];
      for_each_element(row, [&](std::int64_t element) {
        store(data, t->dtype, first + element, std::numeric_limits<double>::quiet_NaN());
      });
    }
  }
}

}  // namespace flashcore::verify
