// A complete, valid call that a test then breaks in one place.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/call.h"

namespace flashcore::test {

enum class Form { fixed, packed, paged };

/// f32, (2, 4 heads on 2, 5 x 7, 16/12), every tensor given; or packed, with cu_seqlens; or with
/// the keys in pages of 3.
struct GoodCall {
  explicit GoodCall(Form form = Form::fixed);

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
  Form form;
  std::function<void(GoodCall&)> spoil;
  StatusCode code;
  std::vector<std::string> words;  ///< all in the message
};

/// One row per way to go wrong.
std::vector<BadCall> bad_shapes();
std::vector<BadCall> bad_pages();
std::vector<BadCall> bad_memory();
std::vector<BadCall> bad_options();
std::vector<BadCall> bad_lengths();

}  // namespace flashcore::test
