// Offsets past 2^31 elements and 2^32 bytes, on sparse mappings with huge strides. The result must
// equal that of compact tensors bit for bit.
#include <cstring>
#include <memory>

#include "property/sparse_memory.h"
#include "support/kernel_test.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

// The stride is above 2^31 elements, and above 2^32 bytes even for 1-byte elements. It is odd, so
// that an offset truncated to 32 bits points to other memory.
constexpr std::int64_t kHuge = (std::int64_t{1} << 32) + 4097;

/// A copy of a tensor in which one axis has a stride of kHuge elements.
class HugeTensor {
 public:
  HugeTensor(const Tensor& compact, int axis) : view_(compact.view()) {
    std::int64_t stride = 1;
    for (int i = view_.rank - 1; i >= 0; --i) {
      if (i == axis) continue;
      view_.strides[i] = stride;
      stride *= view_.shape[i];
    }
    view_.strides[axis] = kHuge;
    std::int64_t reach = 1;
    for (int i = 0; i < view_.rank; ++i) reach += (view_.shape[i] - 1) * view_.strides[i];
    memory_ =
        std::make_unique<SparseMemory>(static_cast<std::size_t>(reach * size_of(view_.dtype)));
    view_.data = memory_->data();
    if (view_.data == nullptr) return;
    const std::vector<std::uint64_t> bits = compact.bits();
    auto next = bits.begin();
    const auto size = static_cast<std::size_t>(size_of(view_.dtype));
    verify::for_each_element(view_, [&](std::int64_t at) {
      std::memcpy(memory_->data() + static_cast<std::size_t>(at) * size, &*next++, size);
    });
  }
  bool exists() const { return view_.data != nullptr; }
  const TensorView& view() const { return view_; }

  /// Back to a compact tensor.
  Tensor compact() const {
    Tensor tensor(view_.dtype, {view_.shape, view_.shape + view_.rank});
    std::vector<std::uint64_t> bits;
    const auto size = static_cast<std::size_t>(size_of(view_.dtype));
    verify::for_each_element(view_, [&](std::int64_t at) {
      std::uint64_t element = 0;
      std::memcpy(&element, memory_->data() + static_cast<std::size_t>(at) * size, size);
      bits.push_back(element);
    });
    tensor.set_bits(bits);
    return tensor;
  }

 private:
  TensorView view_;
  std::unique_ptr<SparseMemory> memory_;
};

constexpr const char* kRefused =
    "the system refuses a sparse mapping of 256 GiB: an address space limit, or a sanitizer that "
    "reserves the addresses";

bool sparse_memory_works() { return SparseMemory(std::size_t{1} << 38).data() != nullptr; }

class HugeOffsets : public KernelTest {
 protected:
  void SetUp() override {
    if (!sparse_memory_works()) GTEST_SKIP() << kRefused;
  }
};
FLASHCORE_FOR_EACH_KERNEL(HugeOffsets);

struct Slot {
  const char* name;
  TensorView Tensors::*view;
};

constexpr Slot kSlots[] = {{"q", &Tensors::q},
                           {"k", &Tensors::k},
                           {"v", &Tensors::v},
                           {"out", &Tensors::out},
                           {"lse", &Tensors::lse},
                           {"bias", &Tensors::bias},
                           {"mask", &Tensors::mask},
                           {"alibi_slopes", &Tensors::alibi_slopes},
                           {"sinks", &Tensors::sinks},
                           {"seqused_k", &Tensors::seqused_k},
                           {"q_start", &Tensors::q_start},
                           {"k_start", &Tensors::k_start}};

void run_call(const Tensors& tensors, const Options& options) {
  const Result<Problem> problem = make_problem(tensors, options);
  ASSERT_TRUE(problem.ok()) << problem.status().message();
  const Result<Plan> plan = make_plan(*problem, *device_info(Device{}));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  WorkspaceMemory workspace(plan->workspace_bytes);
  const Status status = run(*plan, tensors, workspace.get());
  ASSERT_TRUE(status.ok()) << status.message();
}

/// Runs the call once per tensor and axis, with a huge stride of that axis, and compares with the
/// compact result.
void expect_same_with_each_axis_huge(const Inputs& inputs) {
  const Output want = attend(inputs);
  ASSERT_TRUE(want.status.ok()) << want.status.message();
  const Tensor* owned[] = {&inputs.q,     &inputs.k,      &inputs.v,       nullptr,
                           nullptr,       &inputs.bias,   &inputs.mask,    &inputs.alibi_slopes,
                           &inputs.sinks, &inputs.used_k, &inputs.q_start, &inputs.k_start};
  int tried = 0;
  for (std::size_t slot = 0; slot < std::size(kSlots); ++slot) {
    Output output = make_output(inputs);
    Tensors tensors = tensors_of(inputs, output.out, output.lse);
    const Tensor& original = slot == 3 ? output.out : slot == 4 ? output.lse : *owned[slot];
    if (!original.given()) continue;
    for (int axis = 0; axis < original.rank(); ++axis) {
      if (original.size(axis) < 2) continue;
      SCOPED_TRACE(std::string(kSlots[slot].name) + " axis " + std::to_string(axis));
      const HugeTensor huge(original, axis);
      ASSERT_TRUE(huge.exists()) << "mmap refused";
      tensors.*kSlots[slot].view = huge.view();
      run_call(tensors, inputs.options);
      if (testing::Test::HasFatalFailure()) return;
      const Tensor& out = slot == 3 ? huge.compact() : output.out;
      const Tensor& lse = slot == 4 ? huge.compact() : output.lse;
      FLASHCORE_EXPECT_SAME_BITS(out, want.out);
      FLASHCORE_EXPECT_SAME_BITS(lse, want.lse);
      ++tried;
    }
  }
  EXPECT_GT(tried, 15);
}

TEST_P(HugeOffsets, EveryTensorAndAxisGivesTheSameBits) {
  Inputs inputs = draw_inputs(random(), kernel(),
                              {.batch = 2,
                               .q_heads = 4,
                               .kv_heads = 2,
                               .q_len = 3,
                               .kv_len = 5,
                               .head_dim = 4,
                               .v_dim = 3});
  inputs.bias = draw_normal(random(), dtype(), {2, 4, 3, 5});
  inputs.mask = draw_mask(random(), {2, 4, 3, 5}, 0.8);
  inputs.alibi_slopes = draw_normal(random(), DType::f32, {2, 4}, 0.1);
  inputs.sinks = draw_normal(random(), DType::f32, {4});
  inputs.used_k = ints({5, 4});
  inputs.q_start = ints({2, 1});
  inputs.k_start = ints({0, 1});
  inputs.options.causal = true;
  expect_same_with_each_axis_huge(inputs);
  inputs.options.num_splits = 2;  // the combine step writes out and lse
  inputs.k = draw_normal(random(), dtype(), {2, 2, 300, 4}, 0.5);
  inputs.v = draw_normal(random(), dtype(), {2, 2, 300, 3});
  inputs.bias = inputs.mask = inputs.used_k = {};
  const Output want = attend(inputs);
  ASSERT_EQ(want.plan.splits, 2);
  Output output = make_output(inputs);
  const HugeTensor out(output.out, 2), lse(output.lse, 1);
  ASSERT_TRUE(out.exists() && lse.exists());
  Tensors tensors = tensors_of(inputs, output.out, output.lse);
  tensors.out = out.view();
  tensors.lse = lse.view();
  run_call(tensors, inputs.options);
  FLASHCORE_EXPECT_SAME_BITS(out.compact(), want.out);
  FLASHCORE_EXPECT_SAME_BITS(lse.compact(), want.lse);
}

TEST_P(HugeOffsets, VarlenGivesTheSameBits) {
  Inputs inputs;
  inputs.q = draw_normal(random(), dtype(), {6, 2, 4});
  inputs.k = draw_normal(random(), dtype(), {9, 2, 4});
  inputs.v = draw_normal(random(), dtype(), {9, 2, 3});
  inputs.cu_seqlens_q = ints({0, 2, 6});
  inputs.cu_seqlens_k = ints({0, 4, 9});
  inputs.sinks = draw_normal(random(), DType::f32, {2});
  inputs.q_start = ints({2, 1});
  inputs.options.kernel = kernel().id;
  expect_same_with_each_axis_huge(inputs);
}

TEST(HugeOffsetsOfMerge, EveryAxisGivesTheSameBits) {
  if (!sparse_memory_works()) GTEST_SKIP() << kRefused;
  Random random(8);
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Tensor first_out = draw_normal(random, dtype, {2, 2, 3, 5});
    const Tensor first_lse = draw_normal(random, dtype, {2, 2, 3});
    const Tensor other_out = draw_normal(random, dtype, {2, 2, 3, 5});
    const Tensor other_lse = draw_normal(random, dtype, {2, 2, 3});
    const Tensor out(dtype, {2, 2, 3, 5}), lse(dtype, {2, 2, 3});
    const PartialResult compact[] = {{first_out.view(), first_lse.view()},
                                     {other_out.view(), other_lse.view()}};
    ASSERT_TRUE(merge(compact, out.view(), lse.view()).ok());
    for (int axis = 0; axis < 3; ++axis) {
      const HugeTensor huge_first(first_out, axis), huge_first_lse(first_lse, axis);
      const HugeTensor huge_out(Tensor(dtype, {2, 2, 3, 5}), axis);
      const HugeTensor huge_lse(Tensor(dtype, {2, 2, 3}), axis);
      ASSERT_TRUE(huge_first.exists() && huge_first_lse.exists() && huge_out.exists() &&
                  huge_lse.exists());
      const PartialResult partials[] = {{huge_first.view(), huge_first_lse.view()},
                                        {other_out.view(), other_lse.view()}};
      const Status status = merge(partials, huge_out.view(), huge_lse.view());
      ASSERT_TRUE(status.ok()) << status.message();
      FLASHCORE_EXPECT_SAME_BITS(huge_out.compact(), out);
      FLASHCORE_EXPECT_SAME_BITS(huge_lse.compact(), lse);
    }
  }
}

}  // namespace
}  // namespace flashcore::test
