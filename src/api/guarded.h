// What every public call does around its own work.
#pragma once

#include <exception>
#include <new>

#include "core/error.h"
#include "flashcore/attention.h"

namespace flashcore {

inline constexpr std::size_t kWorkspaceAlignment = 256;

/// Whatever happens inside, nothing is thrown at the caller.
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

/// needed: with the header, wherever that is.
inline Status check_workspace(const Workspace& workspace, std::size_t needed) noexcept {
  const bool apart = workspace.header != nullptr;
  if (apart) needed -= kWorkspaceHeaderBytes;
  const bool has_data = !apart || needed > 0;
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
                            needed, apart ? " behind the header" : "");
  }
  return {};
}

/// `whose` is the tensor that says where the call runs.
inline Status check_workspace_device(const Workspace& workspace, Device device,
                                     const char* whose) noexcept {
  if (workspace.device == device) return {};
  return invalid_argument("workspace: is on %s:%d, %s is on %s:%d; set Workspace::device",
                          to_string(workspace.device.type), workspace.device.index, whose,
                          to_string(device.type), device.index);
}

}  // namespace flashcore
