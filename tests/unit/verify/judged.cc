#include "unit/verify/judged.h"

#include <string>

namespace flashcore::test {

Judged::Judged(const Inputs& given, DType out_dtype)
    : inputs(given), output(make_output(given, {.out = out_dtype})) {
  const Tensors tensors = tensors_of(inputs, output.out, output.lse);
  output.problem = *make_problem(tensors, inputs.options);
  oracle = reference::compute(output.problem, tensors, reference::all_rows(output.problem, tensors),
                              false, 1);
  arithmetic = verify::arithmetic_of(output.out.dtype(), wide(inputs.q.dtype()));
  const std::int64_t v_dim = inputs.v.shape().back();
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    const auto [b, h, i] = oracle.rows[r];
    for (std::int64_t c = 0; c < v_dim; ++c) {
      output.out.set({b, h, i, c},
                     oracle.out[r * static_cast<std::size_t>(v_dim) + static_cast<std::size_t>(c)]);
    }
    output.lse.set({b, h, i}, oracle.lse[r]);
  }
}

verify::Comparison Judged::compare() const {
  return verify::compare(oracle, output.problem, tensors_of(inputs, output.out, output.lse),
                         arithmetic);
}

Inputs default_inputs(std::uint64_t seed, DType dtype, double sigma, std::int64_t kv_len) {
  Random random(seed);
  const std::string kernel = std::string("fwd_generic_") + to_string(dtype);
  Inputs inputs = draw_inputs(random, *find_kernel(kernel.c_str()),
                              {.batch = 2,
                               .q_heads = 4,
                               .kv_heads = 2,
                               .q_len = 6,
                               .kv_len = kv_len,
                               .head_dim = 16,
                               .v_dim = 16},
                              sigma);
  inputs.options.kernel = nullptr;
  return inputs;
}

}  // namespace flashcore::test
