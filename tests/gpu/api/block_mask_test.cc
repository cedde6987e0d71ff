// Block masks on the GPU: every kernel gives the bits of the same boolean mask.
#include "flashcore/block_mask.h"

#include "gpu/support.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

template <typename T>
std::vector<std::byte> to_bytes(const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const std::byte*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

/// Runs the case and returns its memory.
std::vector<std::byte> run_case(const verify::CaseMemory& memory, const BlockMask& mask,
                                bool by_blocks) {
  const DeviceBuffer block(memory.bytes());
  Tensors t = memory.at(block.data(), kGpu);
  std::vector<std::uint8_t> dense(
      static_cast<std::size_t>(mask.batch * mask.heads * mask.q_len * mask.kv_len));
  const TensorView host =
      view(dense.data(), DType::boolean, {mask.batch, mask.heads, mask.q_len, mask.kv_len});
  require(expand_block_mask(mask.blocks_view(), mask.bits_view(), host));
  std::vector<std::int32_t> bits = mask.bits;
  bits.resize(std::max<std::size_t>(bits.size(), 1));
  const DeviceBuffer blocks_on_gpu(to_bytes(mask.blocks)), bits_on_gpu(to_bytes(bits)),
      dense_on_gpu(to_bytes(dense));
  const auto moved = [](TensorView tensor, const DeviceBuffer& to) {
    tensor.data = to.data();
    tensor.device = kGpu;
    return tensor;
  };
  if (by_blocks) {
    t.mask_blocks = moved(mask.blocks_view(), blocks_on_gpu);
    t.mask_bits = moved(mask.bits_view(), bits_on_gpu);
  } else {
    t.mask = moved(host, dense_on_gpu);
  }
  const Plan plan = plan_for(t, memory.spec().options);
  const TestWorkspace workspace(plan.workspace_bytes);
  require(run(plan, t, workspace.get()));
  require(workspace_status(workspace.get()));
  EXPECT_TRUE(workspace.header_is_zero());
  return block.download();
}

/// Masks of several patterns for q_len queries and kv_len keys.
std::vector<BlockMask> some_masks(std::int64_t q_len, std::int64_t kv_len) {
  std::vector<BlockMask> masks;
  BlockMaskSpec spec;
  spec.q_len = q_len, spec.kv_len = kv_len;
  spec.block_q = 64;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(2 * kv_len));
  for (std::size_t j = 0; j < ids.size(); ++j) ids[j] = static_cast<std::int32_t>(j) / 150;
  spec.values = view(ids.data(), DType::i32, {2, kv_len});
  masks.push_back(require(make_block_mask(spec)));
  spec.pattern = MaskPattern::sliding_window;
  spec.block_q = 16, spec.block_k = 32;
  spec.window_left = 70, spec.window_right = 5, spec.global_tokens = 3;
  masks.push_back(require(make_block_mask(spec)));
  verify::Random random(11);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(2 * 4 * q_len * kv_len));
  for (std::size_t n = 0; n < dense.size(); ++n) {
    const bool hidden_block = n / 512 % 3 == 0;
    dense[n] = !hidden_block && random.chance(0.7) ? 1 : 0;
  }
  spec.pattern = MaskPattern::dense;
  spec.block_q = 128, spec.block_k = 256;
  spec.values = view(dense.data(), DType::boolean, {2, 4, q_len, kv_len});
  masks.push_back(require(make_block_mask(spec)));
  return masks;
}

class BlockMaskOnGpu : public GpuTest {};

TEST_F(BlockMaskOnGpu, SameBitsAsTheBooleanMaskOnEveryKernel) {
  int tested = 0;
  for (const auto& [q_len, kv_len] :
       {std::pair<std::int64_t, std::int64_t>{300, 700}, {16, 1000}, {130, 129}}) {
    const std::vector<BlockMask> masks = some_masks(q_len, kv_len);
    for (const KernelInfo* kernel : runnable_kernels()) {
      if (kernel->op != Operation::fwd || kernel->inputs != Inputs::native ||
          !any(kernel->features & Features::mask) || kernel->head_dim > 256) {
        continue;
      }
      for (const BlockMask& mask : masks) {
        verify::CaseSpec spec = dense(*kernel, 2, 4, 2, q_len, kv_len);
        spec.options.kernel = kernel->id;
        spec.options.causal = mask.block_q != 128;
        spec.lse = true;
        const verify::CaseMemory memory(spec);
        EXPECT_EQ(run_case(memory, mask, true), run_case(memory, mask, false))
            << kernel->id << " q_len " << q_len << " block_q " << mask.block_q;
        ++tested;
      }
    }
  }
  EXPECT_GT(tested, 0);
}

TEST_F(BlockMaskOnGpu, RandomBlocksAreRightOnEveryKernel) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    if (kernel->op != Operation::fwd || !any(kernel->features & Features::mask)) continue;
    verify::CaseSpec spec = dense(*kernel, 2, 4, 2, 200, 333);
    spec.mask = {true, true, true, true};
    spec.mask_block_q = 32, spec.mask_block_k = 64;
    spec.options.kernel = kernel->id;
    spec.lse = true;
    verify::fit_to_kernel(*kernel, spec);
    const verify::CaseMemory memory(spec);
    GpuCase on_gpu(memory);
    const std::vector<std::byte> block = on_gpu.direct(memory, nullptr);
    expect_right(memory, block, on_gpu.plan());
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
