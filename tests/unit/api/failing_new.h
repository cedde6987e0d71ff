// Global operator new that fails on demand. Only flashcore_allocation_tests links failing_new.cc.
#pragma once

namespace flashcore::test {

enum class Failing { once, from_then_on };

/// Lets `allowed` allocations succeed, then fails the next one, or all later ones.
void fail_allocation(long allowed, Failing failing);

/// Ends the failures. Returns whether an allocation failed.
bool stop_failing();

}  // namespace flashcore::test
