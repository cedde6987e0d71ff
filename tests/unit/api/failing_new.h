// Global operator new that fails on demand, for the one program that includes failing_new.cc.
#pragma once

namespace flashcore::test {

enum class Failing { once, from_then_on };

/// Allocation number `allowed` (from 0) from now on fails.
void fail_allocation(long allowed, Failing failing);

/// Back to normal. Whether an allocation was refused meanwhile.
bool stop_failing();

}  // namespace flashcore::test
