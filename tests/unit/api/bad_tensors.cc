// Calls with an invalid tensor: shape, type, memory.
#include <limits>
#include <utility>

#include "unit/api/bad_call.h"

namespace flashcore::test {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;
constexpr StatusCode kUnsupported = StatusCode::unsupported;

std::string with_colon(const char* name) { return std::string(name) + ":"; }

/// Adds a row for each tensor of the call that `applies` accepts.
void for_each_tensor(std::vector<BadCall>& rows, CallLayout layout, const char* what,
                     StatusCode code, const std::function<bool(const TensorView&)>& applies,
                     const std::function<void(GoodCall&, TensorView&)>& corrupt,
                     const std::vector<std::string>& words) {
  const GoodCall good(layout);
  for (const auto& [name, member] : good.named()) {
    if (!applies(good.tensors.*member)) continue;
    std::vector<std::string> all = words;
    all.push_back(with_colon(name));
    rows.push_back(
        {std::string(name) + " " + what, layout,
         [member = member, corrupt](GoodCall& call) { corrupt(call, call.tensors.*member); }, code,
         all});
  }
}

}  // namespace

std::vector<BadCall> bad_shapes() {
  std::vector<BadCall> rows;
  const auto any = [](const TensorView&) { return true; };
  const auto wide = [](const TensorView& t) { return t.rank > 1; };
  for (const CallLayout layout : {CallLayout::dense, CallLayout::varlen, CallLayout::paged}) {
    for_each_tensor(rows, layout, "has one axis too many", kInvalid, any,
                    [](GoodCall&, TensorView& t) {
                      if (t.rank < TensorView::kMaxRank) t.shape[t.rank] = t.strides[t.rank] = 1;
                      ++t.rank;
                    },
                    {});
    for_each_tensor(
        rows, layout, "has one axis too few", kInvalid,
        [](const TensorView& t) { return t.rank > 1 && !(t.rank == 2 && t.shape[0] == 2); },
        [](GoodCall&, TensorView& t) { --t.rank; }, {"rank is"});
    for_each_tensor(
        rows, layout, "has another type", kInvalid, any,
        [](GoodCall&, TensorView& t) { t.dtype = t.dtype == DType::i32 ? DType::f32 : DType::i32; },
        {"dtype is", "wanted"});
    for_each_tensor(rows, layout, "has a negative extent", kInvalid, any,
                    [](GoodCall&, TensorView& t) { t.shape[t.rank - 1] = -3; }, {"-3"});
    for_each_tensor(rows, layout, "has too large an extent", kInvalid, any,
                    [](GoodCall&, TensorView& t) { t.shape[0] = std::int64_t{1} << 31; },
                    {"2147483648"});
    for_each_tensor(rows, layout, "has a negative stride", kInvalid, wide,
                    [](GoodCall&, TensorView& t) { t.strides[t.rank - 2] = -16; },
                    {"stride", "-16"});
    for_each_tensor(rows, layout, "reaches past the address space", kInvalid, wide,
                    [](GoodCall&, TensorView& t) {
                      t.strides[t.rank - 2] = std::numeric_limits<std::int64_t>::max();
                    },
                    {"9223372036854775807", "address space"});
    // The distance fits 64 bits, but sums of such distances overflow.
    for_each_tensor(rows, layout, "reaches 2^61 bytes", kInvalid, wide,
                    [](GoodCall&, TensorView& t) {
                      const int axis = t.rank - 2;
                      t.strides[axis] =
                          (std::int64_t{1} << 61) / ((t.shape[axis] - 1) * size_of(t.dtype));
                    },
                    {"address space"});
  }
  const auto extent = [&](const char* name, TensorView Tensors::*member, int axis,
                          std::int64_t value, std::vector<std::string> words,
                          StatusCode code = kInvalid) {
    rows.push_back(
        {std::string(name) + " extent " + std::to_string(axis) + " is " + std::to_string(value),
         CallLayout::dense, [=](GoodCall& call) { (call.tensors.*member).shape[axis] = value; },
         code, std::move(words)});
  };
  extent("k", &Tensors::k, 0, 3, {"k: batch is 3", "2"});
  extent("k", &Tensors::k, 3, 8, {"k: head_dim is 8", "16"});
  extent("v", &Tensors::v, 0, 1, {"v: batch is 1", "2"});
  extent("v", &Tensors::v, 1, 1, {"v: kv_heads is 1", "2"});
  extent("v", &Tensors::v, 2, 6, {"v: kv_len is 6", "7"});
  extent("out", &Tensors::out, 0, 1, {"out: batch is 1", "2"});
  extent("out", &Tensors::out, 1, 2, {"out: q_heads is 2", "4"});
  extent("out", &Tensors::out, 2, 4, {"out: q_len is 4", "5"});
  extent("out", &Tensors::out, 3, 16, {"out: v_dim is 16", "12"});
  extent("lse", &Tensors::lse, 0, 1, {"lse: batch is 1", "2"});
  extent("lse", &Tensors::lse, 1, 3, {"lse: q_heads is 3", "4"});
  extent("lse", &Tensors::lse, 2, 4, {"lse: q_len is 4", "5"});
  extent("bias", &Tensors::bias, 0, 3, {"bias: batch is 3", "2 or 1"});
  extent("bias", &Tensors::bias, 1, 3, {"bias: q_heads is 3", "4 or 1"});
  extent("bias", &Tensors::bias, 2, 4, {"bias: q_len is 4", "5 or 1"});
  extent("bias", &Tensors::bias, 3, 1, {"bias: kv_len is 1", "wanted 7"});
  extent("mask", &Tensors::mask, 3, 6, {"mask: kv_len is 6", "wanted 7"});
  extent("alibi_slopes", &Tensors::alibi_slopes, 0, 1, {"alibi_slopes: batch is 1", "2"});
  extent("alibi_slopes", &Tensors::alibi_slopes, 1, 3, {"alibi_slopes: q_heads is 3", "4"});
  extent("sinks", &Tensors::sinks, 0, 2, {"sinks: length is 2", "4"});
  extent("seqused_k", &Tensors::seqused_k, 0, 1, {"seqused_k: length is 1", "2"});
  extent("q_start", &Tensors::q_start, 0, 3, {"q_start: length is 3", "2"});
  extent("k_start", &Tensors::k_start, 0, 1, {"k_start: length is 1", "2"});
  for (const std::int64_t dim : {0, 577}) {
    rows.push_back(
        {"head_dim is " + std::to_string(dim),
         CallLayout::dense,
         [dim](GoodCall& call) { call.tensors.q.shape[3] = call.tensors.k.shape[3] = dim; },
         kUnsupported,
         {"head_dim is " + std::to_string(dim), "1 to 576"}});
    rows.push_back(
        {"v_dim is " + std::to_string(dim),
         CallLayout::dense,
         [dim](GoodCall& call) { call.tensors.v.shape[3] = call.tensors.out.shape[3] = dim; },
         kUnsupported,
         {"v_dim is " + std::to_string(dim), "1 to 576"}});
  }
  for (const std::int64_t heads : {0, 3}) {
    rows.push_back(
        {"kv_heads is " + std::to_string(heads),
         CallLayout::dense,
         [heads](GoodCall& call) { call.tensors.k.shape[1] = call.tensors.v.shape[1] = heads; },
         kInvalid,
         {"q_heads is 4", std::to_string(heads) + " kv_heads", "multiple"}});
  }
  for (const auto& [name, member] : {std::pair{"q", &Tensors::q},
                                     {"k", &Tensors::k},
                                     {"v", &Tensors::v},
                                     {"out", &Tensors::out}}) {
    rows.push_back({std::string(name) + " is not given",
                    CallLayout::dense,
                    [member = member](GoodCall& call) { call.tensors.*member = {}; },
                    kInvalid,
                    {with_colon(name), "not given"}});
  }
  return rows;
}

std::vector<BadCall> bad_pages() {
  std::vector<BadCall> rows;
  const auto paged = [&](const char* name, const std::function<void(Tensors&)>& corrupt,
                         std::vector<std::string> words, StatusCode code = kInvalid) {
    rows.push_back({name, CallLayout::paged, [corrupt](GoodCall& call) { corrupt(call.tensors); },
                    code, std::move(words)});
  };
  paged("v has fewer pages", [](Tensors& t) { t.v.shape[0] = 4; }, {"v: pages is 4", "5"});
  paged("v has smaller pages", [](Tensors& t) { t.v.shape[1] = 2; }, {"v: page_size is 2", "3"});
  paged("v has fewer heads", [](Tensors& t) { t.v.shape[2] = 1; }, {"v: kv_heads is 1", "2"});
  paged("k has another head_dim", [](Tensors& t) { t.k.shape[3] = 8; }, {"k: head_dim is 8", "16"});
  paged("three rows of page ids", [](Tensors& t) { t.block_table.shape[0] = 3; },
        {"block_table: batch is 3", "2"});
  paged("bias of the used keys only", [](Tensors& t) { t.bias.shape[3] = 7; },
        {"bias: kv_len is 7", "wanted 9"});
  for (const std::int64_t size : {0, 257}) {
    paged(
        size == 0 ? "pages of no key" : "pages of 257 keys",
        [size](Tensors& t) { t.k.shape[1] = t.v.shape[1] = size; },
        {"k: page_size is " + std::to_string(size), "1 to 256"}, kUnsupported);
  }
  paged("no page", [](Tensors& t) { t.k.shape[0] = t.v.shape[0] = 0; },
        {"k: has no page", "3 columns"});
  paged("strided page ids", [](Tensors& t) { t.block_table.strides[1] = 2; },
        {"block_table: stride 1 is 2", "contiguous"});
  rows.push_back(
      {"paged and varlen keys",
       CallLayout::varlen,
       [](GoodCall& call) {
         call.tensors.block_table = view(call.tensors.seqused_k.data, DType::i32, {2, 1});
       },
       kInvalid,
       {"block_table: given together with cu_seqlens_k", "seqused_k"}});
  return rows;
}

std::vector<BadCall> bad_memory() {
  std::vector<BadCall> rows;
  const auto any = [](const TensorView&) { return true; };
  for (const CallLayout layout : {CallLayout::dense, CallLayout::varlen, CallLayout::paged}) {
    for_each_tensor(rows, layout, "is null", kInvalid, any,
                    [](GoodCall&, TensorView& t) { t.data = nullptr; }, {"null"});
    for_each_tensor(
        rows, layout, "is misaligned", kInvalid,
        [](const TensorView& t) { return size_of(t.dtype) > 1; },
        [](GoodCall&, TensorView& t) { t.data = static_cast<char*>(t.data) + 1; },
        {"not aligned", "4 bytes"});
    const GoodCall good(layout);
    for (const auto& [name, member] : good.named()) {
      if (member != &Tensors::q) {
        rows.push_back({std::string(name) + " is on another device",
                        layout,
                        [member = member](GoodCall& call) {
                          (call.tensors.*member).device = {DeviceType::cuda, 3};
                        },
                        kInvalid,
                        {with_colon(name), "cuda:3", "cpu:0", "one device"}});
      }
      if (member == &Tensors::out) continue;
      const std::string message = member == &Tensors::lse
                                      ? "lse: shares memory with out"
                                      : std::string("out: shares memory with the input ") + name;
      rows.push_back({std::string(name) + " shares memory with out",
                      layout,
                      [member = member](GoodCall& call) {
                        (call.tensors.*member).data = call.tensors.out.data;
                      },
                      kInvalid,
                      {message}});
    }
  }
  const auto strides = [&](const char* name, TensorView Tensors::*member, int axis,
                           std::int64_t stride) {
    rows.push_back(
        {std::string(name) + " stride " + std::to_string(axis) + " is " + std::to_string(stride),
         CallLayout::dense,
         [=](GoodCall& call) { (call.tensors.*member).strides[axis] = stride; },
         kInvalid,
         {with_colon(name), "overlap"}});
  };
  for (int axis = 0; axis < 4; ++axis) strides("out", &Tensors::out, axis, 0);
  for (int axis = 0; axis < 3; ++axis) strides("lse", &Tensors::lse, axis, 0);
  strides("out", &Tensors::out, 2, 11);  // rows of 12
  strides("lse", &Tensors::lse, 1, 4);   // rows of 5
  rows.push_back({"lse shares memory with q",
                  CallLayout::dense,
                  [](GoodCall& call) { call.tensors.lse.data = call.tensors.q.data; },
                  kInvalid,
                  {"lse: shares memory with the input q"}});
  rows.push_back({"cu_seqlens_q is not contiguous",
                  CallLayout::varlen,
                  [](GoodCall& call) { call.tensors.cu_seqlens_q.strides[0] = 0; },
                  kInvalid,
                  {"cu_seqlens_q:", "stride is 0", "contiguous"}});
  return rows;
}

}  // namespace flashcore::test
