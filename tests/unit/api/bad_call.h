// Valid calls, and changes that make them invalid.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/call.h"

namespace flashcore::test {

enum class CallLayout { dense, varlen, paged };

/// A valid call with every tensor its layout allows: f32, batch 2, 4 query heads, 2 KV heads, 5
/// queries, 7 keys, dims 16/12. Paged: pages of 3 keys.
struct GoodCall {
  explicit GoodCall(CallLayout layout = CallLayout::dense);

  Inputs inputs;
  Output output;
  Tensors tensors;  ///< views of both; tests change them
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
  CallLayout layout;
  std::function<void(GoodCall&)> corrupt;
  StatusCode code;
  std::vector<std::string> words;  ///< the message contains all of them
};

/// One row per error.
std::vector<BadCall> bad_shapes();
std::vector<BadCall> bad_pages();
std::vector<BadCall> bad_memory();
std::vector<BadCall> bad_options();
std::vector<BadCall> bad_lengths();

}  // namespace flashcore::test
