// A CPU call whose calling thread can be interrupted.
#pragma once

#include <functional>

#include "flashcore/attention.h"

namespace flashcore {

/// run() on a thread of its own. This thread calls stop() every few milliseconds until it returns
/// true: then the call is cancelled. Allocates the workspace, because stop() may start another call
/// that uses the caller's. Without a thread to be had, stop() is not called.
Status run_polled(const Plan& plan, const Tensors& tensors, const std::function<bool()>& stop);

}  // namespace flashcore
