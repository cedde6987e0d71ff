// Selects the backend of a device, and turns error slots into messages.
#include "backend/backend.h"

#include <new>

#include "core/error.h"
#include "core/params.h"

namespace flashcore {

Result<const Backend*> backend_for(DeviceType type) noexcept {
  if (type == DeviceType::cpu) return &cpu_backend();
  if (const Backend* cuda = cuda_backend()) return cuda;
  return unsupported("device is cuda, but %s", cuda_availability().reason.c_str());
}

Result<DeviceInfo> device_info(Device device) noexcept {
  try {
    const Result<const Backend*> backend = backend_for(device.type);
    if (!backend.ok()) return backend.status();
    return (*backend)->device_info(device.index);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

Status measure_rates(DeviceInfo& info) noexcept {
  try {
    const Result<const Backend*> backend = backend_for(info.device.type);
    if (!backend.ok()) return backend.status();
    return (*backend)->measure_rates(info);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

Status describe_error(const core::ErrorSlot& slot) noexcept {
  const auto message = [&](const char* name, const char* wanted) {
    return invalid_argument("%s[%lld] is %lld (sequence %d); %s", name,
                            static_cast<long long>(slot.index), static_cast<long long>(slot.value),
                            slot.batch, wanted);
  };
  const auto code = static_cast<core::ErrorCode>(slot.code);
  switch (code) {
    case core::ErrorCode::none: return {};
    case core::ErrorCode::cu_seqlens_q_invalid:
      return message(
          "cu_seqlens_q",
          "it must not decrease, exceed total_q, or make a sequence longer than max_q_len");
    case core::ErrorCode::cu_seqlens_k_invalid:
      return message(
          "cu_seqlens_k",
          "it must not decrease, exceed total_k, or make a sequence longer than max_kv_len");
    case core::ErrorCode::used_k_out_of_range:
      return message("seqused_k", "it must be between 0 and the number of keys of the sequence");
    case core::ErrorCode::q_start_out_of_range:
      return message("q_start", "it must be between -2^30 and 2^30");
    case core::ErrorCode::k_start_out_of_range:
      return message("k_start", "it must be between -2^30 and 2^30");
    case core::ErrorCode::page_id_out_of_range:
      return invalid_argument(
          "block_table[%d, %lld] is %lld; the entries for a sequence's keys must be page ids from "
          "0 to pages - 1",
          slot.batch, static_cast<long long>(slot.index), static_cast<long long>(slot.value));
    case core::ErrorCode::append_past_capacity:
      return invalid_argument(
          "seqused_k[%d]: with its new keys sequence %d has %lld keys, more than the cache can "
          "hold; give it more pages (or rows) or append fewer",
          slot.batch, slot.batch, static_cast<long long>(slot.value));
    case core::ErrorCode::cu_seqlens_new_invalid:
      return message("cu_seqlens_new", "it must not decrease or exceed total_new");
    case core::ErrorCode::appended_k_nan:
    case core::ErrorCode::appended_v_nan:
      return invalid_argument(
          "%s: the row for key %lld of batch %d, head %lld, has a NaN, which int8 and byte cannot "
          "represent (on a GPU it became 0); e4m3 and e5m2 can",
          code == core::ErrorCode::appended_k_nan ? "k_new" : "v_new",
          static_cast<long long>(slot.index), slot.batch, static_cast<long long>(slot.value));
    case core::ErrorCode::appended_k_scale:
    case core::ErrorCode::appended_v_scale:
      return invalid_argument(
          "%s: the scale of key %lld of batch %d, head %lld, is not a positive, finite number",
          code == core::ErrorCode::appended_k_scale ? "k_scale" : "v_scale",
          static_cast<long long>(slot.index), slot.batch, static_cast<long long>(slot.value));
    case core::ErrorCode::quantized_nan:
      if (slot.value != 0) {
        return invalid_argument(
            "from: element %lld, counted row by row, or a sum of its row is not finite; int8 and "
            "byte cannot represent its rotation (it became 0); e4m3 and e5m2 have NaN",
            static_cast<long long>(slot.index));
      }
      return invalid_argument(
          "from: element %lld, counted row by row, is NaN, which int8 and byte cannot represent "
          "(it became 0); e4m3 and e5m2 can",
          static_cast<long long>(slot.index));
  }
  return error(StatusCode::internal,
               "the workspace header is corrupt (code %d); was workspace_init() called?",
               slot.code);
}

}  // namespace flashcore
