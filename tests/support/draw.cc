#include "support/draw.h"

#include <algorithm>

#include "plan/model/model.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

/// A multiple of `tile` or a neighbor of one, or any length up to `most`.
std::int64_t draw_length(Random& random, std::int64_t tile, std::int64_t most) {
  if (random.chance(0.4)) return random.between(1, most);
  const std::int64_t edge =
      tile * random.between(1, std::max<std::int64_t>(most / tile, 1)) + random.between(-1, 1);
  return std::clamp<std::int64_t>(edge, 1, most);
}

}  // namespace

Sizes draw_sizes(Random& random, const KernelInfo& kernel) {
  static constexpr std::int64_t kDims[] = {1, 3, 4, 8, 16, 17, 32, 48, 65};
  static constexpr std::int64_t kGroups[] = {1, 1, 2, 3, 4};
  Sizes s;
  s.batch = random.between(1, 3);
  s.kv_heads = random.between(1, 2);
  s.q_heads = s.kv_heads * random.pick(kGroups);
  s.head_dim = random.pick(kDims);
  s.v_dim = random.chance(0.5) ? s.head_dim : random.pick(kDims);
  s.q_len = draw_length(random, kernel.tile_q, 2 * kernel.tile_q / s.q_heads + 2);
  s.kv_len = draw_length(random, cpu_tile_k(kernel.isa, s.head_dim, s.v_dim), 270);
  return s;
}

Tensor draw_normal(Random& random, DType dtype, const Shape& shape, double sigma) {
  Tensor tensor(dtype, shape);
  void* data = tensor.view().data;
  verify::for_each_element(tensor.view(), [&](std::int64_t at) {
    verify::store(data, dtype, at, sigma * random.normal());
  });
  return tensor;
}

Tensor draw_mask(Random& random, const Shape& shape, double visible) {
  Tensor tensor(DType::boolean, shape);
  void* data = tensor.view().data;
  verify::for_each_element(tensor.view(), [&](std::int64_t at) {
    verify::store(data, DType::boolean, at, random.chance(visible) ? 1 : 0);
  });
  return tensor;
}

Inputs draw_inputs(Random& random, const KernelInfo& kernel, const Sizes& s, double sigma) {
  Inputs inputs;
  inputs.q = draw_normal(random, kernel.dtype, {s.batch, s.q_heads, s.q_len, s.head_dim}, sigma);
  inputs.k = draw_normal(random, kernel.dtype, {s.batch, s.kv_heads, s.kv_len, s.head_dim}, sigma);
  inputs.v = draw_normal(random, kernel.dtype, {s.batch, s.kv_heads, s.kv_len, s.v_dim}, sigma);
  inputs.options.kernel = kernel.id;
  return inputs;
}

void add_score_options(Random& random, Inputs& inputs) {
  const std::int64_t batch = inputs.q.size(0), heads = inputs.q.size(1);
  if (random.chance(0.3)) inputs.options.scale = random.chance(0.3) ? -0.2 : 0.4;
  if (random.chance(0.3)) inputs.options.softcap = random.chance(0.5) ? 1.5 : 20.0;
  if (random.chance(0.3)) {
    inputs.alibi_slopes = draw_normal(random, DType::f32,
                                      random.chance(0.5) ? Shape{heads} : Shape{batch, heads}, 0.1);
  }
  if (random.chance(0.3)) {
    inputs.bias = draw_normal(random, random.chance(0.5) ? inputs.q.dtype() : DType::f32,
                              {random.chance(0.5) ? batch : 1, random.chance(0.5) ? heads : 1,
                               random.chance(0.7) ? inputs.q.size(2) : 1, inputs.k.size(2)});
  }
  if (random.chance(0.3)) inputs.sinks = draw_normal(random, DType::f32, {heads});
}

void add_masks(Random& random, Inputs& inputs) {
  const std::int64_t kv_len = inputs.k.size(2);
  inputs.options.causal = random.chance(0.4);
  if (random.chance(0.3)) inputs.options.window_left = random.between(0, kv_len);
  if (random.chance(0.2)) inputs.options.window_right = random.between(0, kv_len);
  if (random.chance(0.3)) {
    inputs.mask = draw_mask(random, {random.chance(0.5) ? inputs.q.size(0) : 1,
                                     random.chance(0.5) ? inputs.q.size(1) : 1,
                                     random.chance(0.7) ? inputs.q.size(2) : 1, kv_len});
  }
}

Inputs draw_call(Random& random, const KernelInfo& kernel) {
  const Sizes sizes = draw_sizes(random, kernel);
  Inputs inputs = draw_inputs(random, kernel, sizes);
  add_score_options(random, inputs);
  add_masks(random, inputs);
  return inputs;
}

std::vector<std::int64_t> draw_permutation(Random& random, std::int64_t count) {
  std::vector<std::int64_t> order = range(0, count);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  return order;
}

Inputs take_batch(const Inputs& inputs, const std::vector<std::int64_t>& indices) {
  Inputs result = inputs;
  for (Tensor Inputs::*tensor : {&Inputs::k, &Inputs::v}) {  // pages belong to no sequence
    if (!inputs.block_table.given()) result.*tensor = take(inputs.*tensor, 0, indices);
  }
  for (Tensor Inputs::*tensor :
       {&Inputs::q, &Inputs::used_k, &Inputs::block_table, &Inputs::q_start, &Inputs::k_start}) {
    if ((inputs.*tensor).given()) result.*tensor = take(inputs.*tensor, 0, indices);
  }
  // A bias or mask of batch size 1 is broadcast to all sequences.
  for (Tensor Inputs::*tensor : {&Inputs::bias, &Inputs::mask}) {
    if ((inputs.*tensor).given() && (inputs.*tensor).size(0) > 1) {
      result.*tensor = take(inputs.*tensor, 0, indices);
    }
  }
  if (inputs.alibi_slopes.rank() == 2) {
    result.alibi_slopes = take(inputs.alibi_slopes, 0, indices);
  }
  return result;
}

}  // namespace flashcore::test
