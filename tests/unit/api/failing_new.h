// Global operator new that fails on demand, for the one program that includes failing_new.cc.
#pragma once

namespace flashcore::test {

enum class Failing { once, from_then_on };

/// The allocation after the next `allowed` ones fails.
void fail_allocation(long allowed, Failing failing);

/// Ends the failures. Returns whether an allocation failed.
bool stop_failing();

}  // namespace flashcore::test
