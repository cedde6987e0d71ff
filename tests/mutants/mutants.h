// The bug zoo: implementations with one known fault each, and right ones of different make.
#pragma once

#include <string>
#include <vector>

#include "flashcore/verify.h"
#include "mutants/reference_impl.h"

namespace flashcore::mutants {

struct Mutant {
  std::string name;
  FaultStage stage = FaultStage::none;  ///< the true one; none: a right implementation
  std::string dtypes;                   ///< those it is shown in, the first one in every run
  std::function<VerifyFunction()> make;
  std::string arithmetic;  ///< declared; empty: the dtype's own
  bool lineage = false;    ///< a bug of FlashCore's ancestors
};

/// Written together with the probes.
std::vector<Mutant> first_mutants();
/// Written after the probes were frozen.
std::vector<Mutant> frozen_mutants();
/// Written against the probes, after both halves.
std::vector<Mutant> adversary_mutants();
std::vector<Mutant> correct_impls();

/// The place of an element among rows of so many columns.
inline std::size_t at(std::int64_t row, std::int64_t columns, std::int64_t column) {
  return static_cast<std::size_t>(row * columns + column);
}

/// The specimen with some parts changed.
template <typename Change>
std::function<VerifyFunction()> mutant(Change change) {
  return [change]() -> VerifyFunction {
    Parts parts = right_parts();
    change(parts);
    return [parts](const flashcore_verify_call& call, std::string*) { return attend(parts, call); };
  };
}

}  // namespace flashcore::mutants
