#include "unit/api/bad_call.h"

#include <limits>
#include <utility>

#include "support/draw.h"

namespace flashcore::test {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;
constexpr StatusCode kUnsupported = StatusCode::unsupported;

}  // namespace

GoodCall::GoodCall(CallLayout layout) {
  Random random(21);
  const auto draw = [&](const Shape& shape) { return draw_normal(random, DType::f32, shape); };
  if (layout == CallLayout::varlen) {
    inputs.q = draw({9, 4, 16});
    inputs.k = draw({14, 2, 16});
    inputs.v = draw({14, 2, 12});
    inputs.cu_seqlens_q = ints({0, 4, 9});
    inputs.cu_seqlens_k = ints({0, 7, 14});
  } else {
    const bool paged = layout == CallLayout::paged;
    const std::int64_t kv_len = paged ? 9 : 7;
    inputs.q = draw({2, 4, 5, 16});
    inputs.k = paged ? draw({5, 3, 2, 16}) : draw({2, 2, 7, 16});
    inputs.v = paged ? draw({5, 3, 2, 12}) : draw({2, 2, 7, 12});
    // Five keys need two pages, so the last entry is not read.
    if (paged) inputs.block_table = tensor_of(DType::i32, {2, 3}, {4, 1, 0, 3, 2, 99});
    inputs.bias = draw({2, 4, 5, kv_len});
    inputs.mask = draw_mask(random, {2, 1, 5, kv_len});
    inputs.alibi_slopes = draw({2, 4});
  }
  inputs.sinks = draw({4});
  inputs.used_k = ints({7, 5});
  inputs.q_start = ints({2, 3});
  inputs.k_start = ints({0, 1});
  output = make_output(inputs);
  tensors = tensors_of(inputs, output.out, output.lse);
}

std::vector<GoodCall::Named> GoodCall::named() const {
  const Named all[] = {{"q", &Tensors::q},
                       {"k", &Tensors::k},
                       {"v", &Tensors::v},
                       {"out", &Tensors::out},
                       {"lse", &Tensors::lse},
                       {"bias", &Tensors::bias},
                       {"mask", &Tensors::mask},
                       {"alibi_slopes", &Tensors::alibi_slopes},
                       {"sinks", &Tensors::sinks},
                       {"cu_seqlens_q", &Tensors::cu_seqlens_q},
                       {"cu_seqlens_k", &Tensors::cu_seqlens_k},
                       {"seqused_k", &Tensors::seqused_k},
                       {"block_table", &Tensors::block_table},
                       {"q_start", &Tensors::q_start},
                       {"k_start", &Tensors::k_start}};
  std::vector<Named> given;
  for (const Named& one : all) {
    if ((tensors.*one.view).given()) given.push_back(one);
  }
  return given;
}

std::vector<BadCall> bad_options() {
  std::vector<BadCall> rows;
  const auto option = [&](const char* name, const std::function<void(Options&)>& corrupt,
                          std::vector<std::string> words, StatusCode code = kInvalid) {
    rows.push_back({name, CallLayout::dense, [corrupt](GoodCall& call) { corrupt(call.options); },
                    code, std::move(words)});
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  option("window_left -2", [](Options& o) { o.window_left = -2; }, {"window_left is -2", "-1"});
  option("window_right -9", [](Options& o) { o.window_right = -9; }, {"window_right is -9"});
  option("scale nan", [=](Options& o) { o.scale = nan; }, {"scale is", "finite"});
  option("scale inf", [=](Options& o) { o.scale = -inf; }, {"scale is -inf", "finite"});
  option("softcap negative", [](Options& o) { o.softcap = -2.5; }, {"softcap is -2.5"});
  option("softcap nan", [=](Options& o) { o.softcap = nan; }, {"softcap is"});
  option("scale beyond f32", [](Options& o) { o.scale = -1e39; }, {"scale is -1e+39", "f32"});
  option("softcap 0 in f32", [](Options& o) { o.softcap = 1e-300; }, {"softcap is 1e-300", "f32"});
  option("scale / softcap beyond f32", [](Options& o) { o.scale = 1e20, o.softcap = 1e-20; },
         {"softcap is 1e-20, scale is 1e+20"});
  option("softcap inf", [=](Options& o) { o.softcap = inf; }, {"softcap is inf"});
  option("num_splits negative", [](Options& o) { o.num_splits = -4; }, {"num_splits is -4"});
  option("splits of a batch-invariant plan",
         [](Options& o) {
           o.num_splits = 3;
           o.reproducibility = Reproducibility::batch_invariant;
         },
         {"num_splits is 3", "batch-invariant"});
  option("max_q_len negative", [](Options& o) { o.max_q_len = -1; }, {"max_q_len is -1"});
  option("max_kv_len negative", [](Options& o) { o.max_kv_len = -7; }, {"max_kv_len is -7"});
  option("unknown kernel", [](Options& o) { o.kernel = "fwd_unknown_f32"; }, {"fwd_unknown_f32"});
  option(
      "kernel of a GPU", [](Options& o) { o.kernel = "fwd_simt_f32_d64_q64"; },
      {"fwd_simt_f32_d64_q64", "cuda"}, kUnsupported);
  rows.push_back({"partial without lse",
                  CallLayout::dense,
                  [](GoodCall& call) {
                    call.options.partial = true;
                    call.tensors.lse = {};
                  },
                  kInvalid,
                  {"lse", "partial"}});
  rows.push_back({"partial with a narrow out",
                  CallLayout::dense,
                  [](GoodCall& call) {
                    call.options.partial = true;
                    call.tensors.out.dtype = DType::f16;
                  },
                  kInvalid,
                  {"out (partial)", "f16", "f32"}});
  return rows;
}

std::vector<BadCall> bad_lengths() {
  std::vector<BadCall> rows;
  const auto value = [&](CallLayout layout, const char* name, TensorView Tensors::*member,
                         int index, std::int32_t number, const std::vector<std::string>& words) {
    for (const bool checked : {false, true}) {
      rows.push_back({std::string(name) + "[" + std::to_string(index) + "] is " +
                          std::to_string(number) + (checked ? " (checked)" : ""),
                      layout,
                      [=](GoodCall& call) {
                        static_cast<std::int32_t*>((call.tensors.*member).data)[index] = number;
                        call.options.checked = checked;
                      },
                      kInvalid, words});
    }
  };
  value(CallLayout::dense, "seqused_k", &Tensors::seqused_k, 1, 8,
        {"seqused_k[1] is 8", "sequence 1"});
  value(CallLayout::dense, "seqused_k", &Tensors::seqused_k, 0, -1,
        {"seqused_k[0] is -1", "sequence 0"});
  value(CallLayout::dense, "q_start", &Tensors::q_start, 1, (1 << 30) + 1,
        {"q_start[1] is 1073741825"});
  value(CallLayout::dense, "k_start", &Tensors::k_start, 0, -(1 << 30) - 1,
        {"k_start[0] is -1073741825"});
  value(CallLayout::varlen, "cu_seqlens_q", &Tensors::cu_seqlens_q, 1, 10,
        {"cu_seqlens_q[1] is 10", "decrease"});
  value(CallLayout::varlen, "cu_seqlens_q", &Tensors::cu_seqlens_q, 2, 3,
        {"cu_seqlens_q[2] is 3", "decrease"});
  value(CallLayout::varlen, "cu_seqlens_q", &Tensors::cu_seqlens_q, 0, -1,
        {"cu_seqlens_q[0] is -1"});
  value(CallLayout::varlen, "cu_seqlens_k", &Tensors::cu_seqlens_k, 2, 15,
        {"cu_seqlens_k[2] is 15", "total_k"});
  value(CallLayout::varlen, "cu_seqlens_k", &Tensors::cu_seqlens_k, 2, 6,
        {"cu_seqlens_k[2] is 6", "decrease"});
  value(CallLayout::varlen, "seqused_k", &Tensors::seqused_k, 0, 8, {"seqused_k[0] is 8"});
  value(CallLayout::paged, "seqused_k", &Tensors::seqused_k, 0, 10, {"seqused_k[0] is 10"});
  value(CallLayout::paged, "block_table", &Tensors::block_table, 1, 5,
        {"block_table[0, 1] is 5", "page ids"});
  value(CallLayout::paged, "block_table", &Tensors::block_table, 2, -1,
        {"block_table[0, 2] is -1"});
  value(CallLayout::paged, "block_table", &Tensors::block_table, 4, 5, {"block_table[1, 1] is 5"});
  rows.push_back({"a sequence longer than max_q_len",
                  CallLayout::varlen,
                  [](GoodCall& call) { call.options.max_q_len = 4; },
                  kInvalid,
                  {"cu_seqlens_q[2] is 9", "max_q_len"}});
  rows.push_back({"a sequence longer than max_kv_len",
                  CallLayout::varlen,
                  [](GoodCall& call) { call.options.max_kv_len = 6; },
                  kInvalid,
                  {"cu_seqlens_k[1] is 7", "max_kv_len"}});
  rows.push_back({"cu_seqlens_q has no element",
                  CallLayout::varlen,
                  [](GoodCall& call) { call.tensors.cu_seqlens_q.shape[0] = 0; },
                  kInvalid,
                  {"cu_seqlens_q", "batch + 1"}});
  rows.push_back({"cu_seqlens_k has another batch",
                  CallLayout::varlen,
                  [](GoodCall& call) { call.tensors.cu_seqlens_k.shape[0] = 2; },
                  kInvalid,
                  {"cu_seqlens_k: length - 1 is 1", "2"}});
  return rows;
}

}  // namespace flashcore::test
