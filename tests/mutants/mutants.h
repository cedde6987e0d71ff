// Mutants: implementations with one injected fault each, and correct ones of different design.
#pragma once

#include <string>
#include <vector>

#include "flashcore/verify.h"
#include "mutants/reference_bwd.h"
#include "mutants/reference_impl.h"

namespace flashcore::mutants {

struct Mutant {
  std::string name;
  FaultStage stage = FaultStage::none;  ///< stage of the fault; none: a correct implementation
  std::string dtypes;                   ///< dtypes to run; without --all only the first
  std::function<VerifyFunction()> make;
  std::string arithmetic;   ///< declared arithmetic; empty: that of the dtype
  bool regression = false;  ///< true for a fault of a real kernel
  /// Of a mutant of the backward pass: its forward pass is correct and not probed.
  std::function<VerifyBackwardFunction()> make_backward = {};
  /// A second name of the fault, where two stages of the vocabulary describe it: dP times the scale
  /// is a fault of dP and of the scale.
  FaultStage also = FaultStage::none;

  bool is_named_by(FaultStage found) const {
    return found == stage || (also != FaultStage::none && found == also);
  }
};

/// Written together with the probes.
std::vector<Mutant> first_mutants();
/// Written after the probes were frozen, so that no probe is tuned for them.
std::vector<Mutant> frozen_mutants();
/// Designed to get past the probes.
std::vector<Mutant> adversary_mutants();
std::vector<Mutant> correct_impls();

/// Mutants of the backward pass that its probes were written or extended for.
std::vector<Mutant> first_backward_mutants();
/// Mutants of the backward pass written after its probes were frozen.
std::vector<Mutant> frozen_backward_mutants();
std::vector<Mutant> correct_backwards();

/// Index of an element of a row-major matrix.
inline std::size_t at(std::int64_t row, std::int64_t columns, std::int64_t column) {
  return static_cast<std::size_t>(row * columns + column);
}

/// The reference implementation with some parts replaced.
template <typename Change>
std::function<VerifyFunction()> mutant(Change change) {
  return [change]() -> VerifyFunction {
    Parts parts = default_parts();
    change(parts);
    return [parts](const flashcore_verify_call& call, std::string*) { return attend(parts, call); };
  };
}

/// The reference backward pass with some parts replaced.
template <typename Change>
Mutant backward(std::string name, FaultStage stage, std::string dtypes, Change change,
                FaultStage also = FaultStage::none) {
  return {std::move(name),
          stage,
          std::move(dtypes),
          mutant([](Parts&) {}),
          "",
          false,
          [change]() -> VerifyBackwardFunction {
            BackwardParts parts = default_backward();
            change(parts);
            return [parts](const flashcore_verify_backward_call& call, std::string*) {
              return differentiate(parts, call);
            };
          },
          also};
}

}  // namespace flashcore::mutants
