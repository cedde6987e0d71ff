// A CPU call whose calling thread can be interrupted.
#pragma once

#include <cstdint>
#include <functional>

#include "flashcore/flashcore.h"

namespace flashcore::python {

/// Returns true to end the call.
using Stop = std::function<bool()>;

/// A call of the C API that ends early when *cancel becomes nonzero.
using PolledCall = std::function<std::int32_t(const std::int32_t* cancel, flashcore_error* error)>;

/// Runs the call on a new thread. This thread calls stop() every few milliseconds and cancels the
/// call when stop() returns true. Returns after the call has ended, so the call may use the
/// caller's memory. If no thread can be started, runs the call here, without stop().
std::int32_t run_polled(const PolledCall& call, const Stop& stop, flashcore_error* error) noexcept;

/// run_polled() of flashcore_attention. Allocates a workspace, because stop() may start another
/// call that uses the caller's.
std::int32_t run_attention_polled(const flashcore_params& params, const Stop& stop,
                                  flashcore_error* error) noexcept;

/// The same for flashcore_attention_backward.
std::int32_t run_backward_polled(const flashcore_backward_params& params, const Stop& stop,
                                 flashcore_error* error) noexcept;

/// True for calls that take 20 ms or more on the CPU. They are worth their own thread.
/// The estimate ignores masks.
bool is_long(const flashcore_params& params) noexcept;
bool is_long(const flashcore_backward_params& params) noexcept;
bool is_long(const flashcore_merge_params& params) noexcept;
bool is_long(const flashcore_append_params& params) noexcept;
bool is_long(const flashcore_quant_params& params) noexcept;

/// DLPack's CPU or pinned host memory.
bool is_cpu(const flashcore_device& device) noexcept;

}  // namespace flashcore::python
