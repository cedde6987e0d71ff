// A complete, valid call that a test then breaks in one place.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/call.h"

namespace flashcore::test {

/// f32, (2, 4 heads on 2, 5 x 7, 16/12), every tensor given; or packed, with cu_seqlens.
struct GoodCall {
  explicit GoodCall(bool packed = false);

  Inputs inputs;
  Output output;
  Tensors tensors;  ///< of the two; a test changes these views
  Options options;

  struct Named {
    const char* name;
    TensorView Tensors::*view;
  };
  /// The tensors that are given.
  std::vector<Named> named() const;
};

struct BadCall {
  std::string name;
  bool packed;
  std::function<void(GoodCall&)> spoil;
  StatusCode code;
  std::vector<std::string> words;  ///< all in the message
};

/// One row per way to go wrong.
std::vector<BadCall> bad_shapes();
std::vector<BadCall> bad_memory();
std::vector<BadCall> bad_options();
std::vector<BadCall> bad_lengths();

}  // namespace flashcore::test
