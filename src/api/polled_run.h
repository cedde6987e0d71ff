// A CPU call whose calling thread can be interrupted.
#pragma once

#include <cstdint>
#include <functional>

#include "flashcore/attention.h"

namespace flashcore {

/// A call of the library that ends early when the flag is set. It throws nothing.
using CancellableCall = std::function<Status(const std::int32_t* cancel)>;

/// The call on a thread of its own. This thread calls stop() every few milliseconds until it
/// returns true: then the call is cancelled. Returns, or throws what stop() throws, when the call
/// has ended, so what the call uses may be the caller's own. Without a thread to be had, stop() is
/// not called.
Status run_polled(const CancellableCall& call, const std::function<bool()>& stop);

/// The same of run(). Allocates the workspace, because stop() may start another call that uses the
/// caller's.
Status run_polled(const Plan& plan, const Tensors& tensors, const std::function<bool()>& stop);

}  // namespace flashcore
