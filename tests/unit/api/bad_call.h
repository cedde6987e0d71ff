// A complete, valid call that a test then breaks in one place.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/call.h"

namespace flashcore::test {

enum class Form { fixed, packed, paged };

/// f32, batch 2, 4 query heads on 2 KV heads, 5 queries, 7 keys, dims 16/12, with every tensor; or
/// varlen; or paged with pages of 3 keys.
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

/// One row per error.
std::vector<BadCall> bad_shapes();
std::vector<BadCall> bad_pages();
std::vector<BadCall> bad_memory();
std::vector<BadCall> bad_options();
std::vector<BadCall> bad_lengths();

}  // namespace flashcore::test
