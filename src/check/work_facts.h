// Sequences of tiles that the CTAs of a persistent kernel are certain to process in a call. A
// kernel can be correct on every tile and still hang on some sequences.
#pragma once

#include "flashcore/attention.h"
#include "flashcore/plan.h"

namespace flashcore::verify {

/// A tile has keys if its mask leaves at least one KV tile. Tiles without query rows (short varlen
/// sequences) do not count. CTAs fetch tiles dynamically, so the order within a CTA is known only
/// if there is one CTA. The two facts about successive tiles are therefore limited to one CTA.
struct WorkFacts {
  bool three_tiles = false;      ///< more than two tiles per CTA: some CTA has three
  bool keyless_between = false;  ///< one CTA: tiles without keys between two with keys
  bool three_keyless = false;    ///< one CTA: three without keys after one with keys
  bool idle_warpgroup = false;   ///< one warpgroup of a tile sees no key, another does
};

/// All false for non-persistent kernels. Reads lengths and starts from `tensors`, on the host.
WorkFacts work_facts(const Plan& plan, const Tensors& tensors);

}  // namespace flashcore::verify
