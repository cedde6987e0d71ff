// Layouts: strides, alignment and gaps change no bit.
#include <cstring>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Layouts : public KernelTest {};
FLASHCORE_FOR_EACH_KERNEL(Layouts);

/// Plans and runs a call on the given views.
void run_views(const Tensors& tensors, const Options& options) {
  const Result<Problem> problem = make_problem(tensors, options);
  ASSERT_TRUE(problem.ok()) << problem.status().message();
  const Plan plan = *make_plan(*problem, *device_info(Device{}));
  WorkspaceMemory workspace(plan.workspace_bytes);
  ASSERT_TRUE(run(plan, tensors, workspace.get()).ok());
}

constexpr MemoryLayout kMemoryLayouts[] = {MemoryLayout::heads_first, MemoryLayout::rows_first,
                                           MemoryLayout::padded, MemoryLayout::misaligned,
                                           MemoryLayout::strided_columns};

TEST_P(Layouts, EveryLayoutGivesTheCompactBits) {
  for (int n = 0; n < rounds(4); ++n) {
    Inputs compact = draw_call(random(), kernel());
    compact.options.num_splits = static_cast<std::int32_t>(random().between(1, 2));
    const Output want = attend(compact);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    for (const MemoryLayout layout : kMemoryLayouts) {
      for (Tensor Inputs::*tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::bias,
                                     &Inputs::mask, &Inputs::alibi_slopes, &Inputs::sinks}) {
        if (!(compact.*tensor).given()) continue;
        Inputs arranged = compact;
        arranged.*tensor = rearranged(compact.*tensor, layout);
        const Output output = attend(arranged);
        ASSERT_TRUE(output.status.ok()) << output.status.message();
        FLASHCORE_EXPECT_SAME(output, want);
      }
      const Output output = attend(compact, {.out_layout = layout});
      FLASHCORE_EXPECT_SAME(output, want);
    }
  }
}

TEST_P(Layouts, MixedLayoutsGiveTheCompactBits) {
  for (int n = 0; n < rounds(30); ++n) {
    const Inputs compact = draw_call(random(), kernel());
    const Output want = attend(compact);
    Inputs arranged = compact;
    for (Tensor Inputs::*tensor :
         {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::bias, &Inputs::mask}) {
      arranged.*tensor = rearranged(compact.*tensor, random().pick(kMemoryLayouts));
    }
    const Output output = attend(arranged, {.out_layout = random().pick(kMemoryLayouts)});
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    FLASHCORE_EXPECT_SAME(output, want);
  }
}

TEST_P(Layouts, SwapAxesReadsSequenceMajorMemory) {
  // Most frameworks store [batch, len, heads, dim]. swap_axes() makes views of that memory.
  const Inputs compact = draw_inputs(random(), kernel(), draw_sizes(random(), kernel()));
  const Output want = attend(compact);
  const auto sequence_major = [](const Tensor& t) {
    Tensor moved(t.dtype(), {t.size(0), t.size(2), t.size(1), t.size(3)});
    for (std::int64_t b = 0; b < t.size(0); ++b) {
      for (std::int64_t h = 0; h < t.size(1); ++h) {
        for (std::int64_t i = 0; i < t.size(2); ++i) {
          for (std::int64_t d = 0; d < t.size(3); ++d) {
            moved.set({b, i, h, d}, t.at({b, h, i, d}));
          }
        }
      }
    }
    return moved;
  };
  const Tensor q = sequence_major(compact.q), k = sequence_major(compact.k),
               v = sequence_major(compact.v), out = sequence_major(want.out);
  Tensor lse(wide(dtype()), want.lse.shape());
  Tensors tensors{.q = swap_axes(q.view(), 1, 2),
                  .k = swap_axes(k.view(), 1, 2),
                  .v = swap_axes(v.view(), 1, 2),
                  .out = swap_axes(out.view(), 1, 2),
                  .lse = lse.view()};
  std::memset(tensors.out.data, 0xff,
              out.bits().size() * static_cast<std::size_t>(size_of(dtype())));
  ASSERT_NO_FATAL_FAILURE(run_views(tensors, compact.options));
  FLASHCORE_EXPECT_SAME_BITS(out, sequence_major(want.out));
  FLASHCORE_EXPECT_SAME_BITS(lse, want.lse);
}

TEST_P(Layouts, StrideZeroRepeatsInputs) {
  for (int n = 0; n < rounds(10); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = 3;
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    // All sequences share K and V of one sequence, all heads share Q of one head.
    inputs.k = take(inputs.k, 0, {1, 1, 1});
    inputs.v = take(inputs.v, 0, {1, 1, 1});
    inputs.q =
        take(inputs.q, 1, std::vector<std::int64_t>(static_cast<std::size_t>(sizes.q_heads), 0));
    const Output want = attend(inputs);
    Output output = make_output(inputs);
    Tensors tensors = tensors_of(inputs, output.out, output.lse);
    tensors.k.strides[0] = tensors.v.strides[0] = 0;
    tensors.q.strides[1] = 0;
    ASSERT_NO_FATAL_FAILURE(run_views(tensors, inputs.options));
    FLASHCORE_EXPECT_SAME(output, want);
  }
}

TEST_P(Layouts, StridesOfSize1AxesAreIgnored) {
  Inputs inputs = draw_inputs(random(), kernel(),
                              {.batch = 1,
                               .q_heads = 1,
                               .kv_heads = 1,
                               .q_len = 1,
                               .kv_len = 5,
                               .head_dim = 1,
                               .v_dim = 1});
  const Output want = attend(inputs);
  Output output = make_output(inputs);
  Tensors tensors = tensors_of(inputs, output.out, output.lse);
  for (TensorView* t : {&tensors.q, &tensors.k, &tensors.v, &tensors.out, &tensors.lse}) {
    for (int axis = 0; axis < t->rank; ++axis) {
      if (t->shape[axis] == 1) t->strides[axis] = -1234567;
    }
  }
  ASSERT_NO_FATAL_FAILURE(run_views(tensors, inputs.options));
  FLASHCORE_EXPECT_SAME(output, want);
}

TEST_P(Layouts, GapsBetweenOutputsAreNotWritten) {
  for (const MemoryLayout layout : {MemoryLayout::padded, MemoryLayout::strided_columns}) {
    const Inputs inputs = draw_call(random(), kernel());
    Output output = make_output(inputs, {.out_layout = layout});
    const Tensors tensors = tensors_of(inputs, output.out, output.lse);
    ASSERT_NO_FATAL_FAILURE(run_views(tensors, inputs.options));
    // The constructor of Tensor fills the gaps with 0xff.
    const auto elements = output.out.bits();
    output.out.fill_bits(~std::uint64_t{0});
    const TensorView view = output.out.view();
    std::int64_t reach = 1;
    for (int i = 0; i < view.rank; ++i) reach += (view.shape[i] - 1) * view.strides[i];
    const auto* bytes = static_cast<const unsigned char*>(view.data);
    for (std::int64_t i = 0; i < reach * size_of(view.dtype); ++i) ASSERT_EQ(bytes[i], 0xff);
    ASSERT_FALSE(elements.empty());
  }
}

}  // namespace
}  // namespace flashcore::test
