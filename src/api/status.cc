#include <cstdarg>
#include <cstdio>
#include <new>

#include "core/cancel.h"
#include "core/error.h"
#include "flashcore/plan.h"
#include "flashcore/types.h"

namespace flashcore {
namespace {

Status formatted(StatusCode code, const char* format, std::va_list arguments) noexcept {
  char text[1024];
  std::vsnprintf(text, sizeof text, format, arguments);
  try {
    return Status(code, text);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

}  // namespace

Status error(StatusCode code, const char* format, ...) noexcept {
  std::va_list arguments;
  va_start(arguments, format);
  Status status = formatted(code, format, arguments);
  va_end(arguments);
  return status;
}

Status invalid_argument(const char* format, ...) noexcept {
  std::va_list arguments;
  va_start(arguments, format);
  Status status = formatted(StatusCode::invalid_argument, format, arguments);
  va_end(arguments);
  return status;
}

Status unsupported(const char* format, ...) noexcept {
  std::va_list arguments;
  va_start(arguments, format);
  Status status = formatted(StatusCode::unsupported, format, arguments);
  va_end(arguments);
  return status;
}

Status out_of_memory() noexcept {
  // Short enough for std::string to allocate nothing.
  return Status(StatusCode::out_of_memory, "out of memory");
}

Status cancelled() noexcept { return error(StatusCode::cancelled, "cancel: the flag was set"); }

Status check_cancel(const std::int32_t* cancel) noexcept {
  return core::is_set(cancel) ? cancelled() : Status();
}

const char* to_string(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::ok: return "ok";
    case StatusCode::invalid_argument: return "invalid_argument";
    case StatusCode::unsupported: return "unsupported";
    case StatusCode::out_of_memory: return "out_of_memory";
    case StatusCode::cuda: return "cuda";
    case StatusCode::internal: return "internal";
    case StatusCode::cancelled: return "cancelled";
  }
  return "unknown";
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::none: return "none";
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::boolean: return "bool";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::int8: return "int8";
    case DType::u8: return "byte";
  }
  return "unknown";
}

const char* to_string(DeviceType type) noexcept { return type == DeviceType::cpu ? "cpu" : "cuda"; }

const char* to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::generic: return "generic";
    case Isa::neon: return "neon";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::vnni: return "vnni";
    case Isa::amx: return "amx";
  }
  return "unknown";
}

}  // namespace flashcore
