// What the blocks of a persistent kernel are certain to meet in a call. Such a block works through
// a list of items; a kernel can be right on every single item and still hang on some lists.
#pragma once

#include "flashcore/attention.h"
#include "flashcore/plan.h"

namespace flashcore::verify {

/// An item has keys where its mask leaves it a tile of them. Items without query rows, of packed
/// sequences that are shorter than others, are in no block's list. Blocks take items as they become
/// free: which block has which item is known only where there is one block, whose list is the work
/// order itself. The two facts about neighbours are therefore claimed of one block only.
struct WorkFacts {
  bool three_items = false;      ///< more than two items per block: some block has three
  bool keyless_between = false;  ///< one block: items without keys between two that have some
  bool three_keyless = false;    ///< one block: three in a row without keys after one that has some
  bool idle_warpgroup = false;   ///< the rows of one warpgroup see no key, those beside it do
};

/// All false but for persistent kernels. `tensors` are on the host; only lengths and starts are
/// read.
WorkFacts work_facts(const Plan& plan, const Tensors& tensors);

}  // namespace flashcore::verify
