// Checks and error handling that all public calls share.
#pragma once

#include <exception>
#include <new>

#include "core/error.h"
#include "flashcore/attention.h"

namespace flashcore {

inline constexpr std::size_t kWorkspaceAlignment = 256;

/// Runs the body of a public call and turns exceptions into a Status.
template <typename Body>
Status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::exception& e) {
    return error(StatusCode::internal, "unexpected: %s", e.what());
  }
}

inline void* header_of(const Workspace& workspace) noexcept {
  return workspace.header != nullptr ? workspace.header : workspace.data;
}

/// `needed` includes the header even if the workspace has a separate one.
inline Status check_workspace(const Workspace& workspace, std::size_t needed) noexcept {
  const bool separate = workspace.header != nullptr;
  if (separate) needed -= kWorkspaceHeaderBytes;
  const bool has_data = !separate || needed > 0;
  if (has_data && workspace.data == nullptr) {
    return invalid_argument("workspace: the pointer is null");
  }
  for (const void* one : {header_of(workspace), has_data ? workspace.data : nullptr}) {
    if (reinterpret_cast<std::uintptr_t>(one) % kWorkspaceAlignment != 0) {
      return invalid_argument("workspace: the pointer %p is not aligned to %zu bytes", one,
                              kWorkspaceAlignment);
    }
  }
  if (workspace.bytes < needed) {
    return invalid_argument("workspace: has %zu bytes, the plan needs %zu%s", workspace.bytes,
                            needed, separate ? " without the header" : "");
  }
  return {};
}

/// `device` is the device of the tensor `tensor_name`.
inline Status check_workspace_device(const Workspace& workspace, Device device,
                                     const char* tensor_name) noexcept {
  if (workspace.device == device) return {};
  return invalid_argument("workspace: is on %s:%d, %s is on %s:%d; set Workspace::device",
                          to_string(workspace.device.type), workspace.device.index, tensor_name,
                          to_string(device.type), device.index);
}

}  // namespace flashcore
