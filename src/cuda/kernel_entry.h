// The entry points of a kernel.
#pragma once

namespace flashcore::cuda {

/// The calls that an entry point is compiled for. A kernel with fewer options is faster, so plain
/// calls have one of their own, and so have calls with an option that needs many registers. A
/// family may have one entry point for several kinds of calls.
enum class KernelEntry {
  plain,    // no options beyond those of the family's fast path
  general,  // all options that the family takes, but a bias in sm90; fused: the kernel that writes
            // dq
  bias,     // a bias and all other options
  softcap,  // a softcap and all options but a bias
  masked,   // a boolean mask, which the fast path lacks, and no other option
  ranges,   // key ranges (core/key_ranges.h) and no option beyond those of the fast path
  general_ranges,  // key ranges and all options but a bias
};
inline constexpr int kKernelEntries = 7;

}  // namespace flashcore::cuda
