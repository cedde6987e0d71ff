// Checked mode: the first invalid length, start or page id that any CTA finds goes to the error
// slot.
#pragma once

#include "core/params.h"
#include "core/seq_info.h"

namespace flashcore::cuda {

/// Does nothing if the slot is null or `found` holds no error.
__device__ __forceinline__ void report(core::ErrorSlot* slot, const core::ErrorSlot& found) {
  if (slot == nullptr || found.code == 0) return;
  if (atomicCAS(&slot->code, 0, found.code) != 0) return;  // keep the first report
  slot->batch = found.batch;
  slot->index = found.index;
  slot->value = found.value;
}

__device__ __forceinline__ void report(const core::AttentionParams& p,
                                       const core::ErrorSlot& found) {
  if (p.checked) report(p.error, found);
}

/// Checks the page ids of sequence b. One CTA per sequence is enough: a kernel calls this function
/// for the first work tile of a sequence, with `threads` threads of the CTA.
__device__ __forceinline__ void report_pages(const core::AttentionParams& p,
                                             const core::SeqInfo& seq, std::int32_t b,
                                             std::int32_t thread, std::int32_t threads) {
  if (!p.checked) return;
  const std::int32_t slots = core::slots_in_use(p.pages, seq.kv_len);
  for (std::int32_t slot = thread; slot < slots; slot += threads) {
    report(p, core::page_error(p.pages, b, slot));
  }
}

}  // namespace flashcore::cuda
