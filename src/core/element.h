// Elements whose format is known only at run time.
#pragma once

#include "core/numeric.h"
#include "core/params.h"

namespace flashcore::core {

/// T is the compute type, float or double.
template <typename T>
FLASHCORE_HD T load_element(const void* base, Element element, std::int64_t index) {
  switch (element) {
    case Element::f64: return static_cast<T>(static_cast<const double*>(base)[index]);
    case Element::f32: return static_cast<T>(static_cast<const float*>(base)[index]);
    case Element::f16: return float_of_f16(static_cast<const std::uint16_t*>(base)[index]);
    case Element::bf16: return float_of_bf16(static_cast<const std::uint16_t*>(base)[index]);
    default: break;  // 8-bit formats have scales: core/quant_formats.h
  }
  return T(0);
}

template <typename T>
FLASHCORE_HD void store_element(void* base, Element element, std::int64_t index, T value) {
  switch (element) {
    case Element::f64: static_cast<double*>(base)[index] = value; break;
    case Element::f32: static_cast<float*>(base)[index] = static_cast<float>(value); break;
    case Element::f16:
      static_cast<std::uint16_t*>(base)[index] = f16_of_float(static_cast<float>(value));
      break;
    case Element::bf16:
      static_cast<std::uint16_t*>(base)[index] = bf16_of_float(static_cast<float>(value));
      break;
    default: break;  // no output is 8-bit
  }
}

}  // namespace flashcore::core
