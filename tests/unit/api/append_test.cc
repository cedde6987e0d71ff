// append(): writes every new row and no other byte, in every cache layout; and its errors, through
// the C++ API and the C ABI.
#include <gtest/gtest.h>

#include <functional>

#include "core/append.h"
#include "support/draw.h"
#include "support/to_c.h"

namespace flashcore::test {
namespace {

/// Appends three keys (varlen: one and two) to two sequences of 5 and 2 keys. The capacity is nine
/// keys. Pages have 3 keys: the first sequence has pages 4, 1, 0, the second 3 and 2; its third
/// entry is invalid and not read.
struct AppendCall {
  explicit AppendCall(bool is_paged, bool is_varlen = false, DType dtype = DType::f32,
                      MemoryLayout layout = MemoryLayout::heads_first)
      : paged(is_paged), varlen(is_varlen) {
    Random random(8);
    const auto draw = [&](Shape shape, std::int64_t dim, MemoryLayout how) {
      shape.push_back(dim);
      return rearranged(draw_normal(random, dtype, shape), how);
    };
    const Shape cache = paged ? Shape{5, 3, 2} : Shape{2, 2, 9};
    const Shape rows = varlen ? Shape{3, 2} : Shape{2, 2, 3};
    k = draw(cache, 16, layout);
    v = draw(cache, 12, layout);
    k_new = draw(rows, 16, MemoryLayout::heads_first);
    v_new = draw(rows, 12, layout);
    used_k = ints({5, 2});
    if (paged) block_table = tensor_of(DType::i32, {2, 3}, {4, 1, 0, 3, 2, 99});
    if (varlen) cu_seqlens_new = ints({0, 1, 3});
    refresh();
  }

  void refresh() {
    tensors = {.k_new = k_new.view(),
               .v_new = v_new.view(),
               .k = k.view(),
               .v = v.view(),
               .seqused_k = used_k.view(),
               .block_table = block_table.view(),
               .cu_seqlens_new = cu_seqlens_new.view()};
  }

  /// The expected cache, key by key.
  void expect_appended(const Tensor& before_k, const Tensor& before_v) const {
    Tensor want_k = before_k, want_v = before_v;
    const int counts[] = {varlen ? 1 : 3, varlen ? 2 : 3}, used[] = {5, 2};
    const int table[2][3] = {{4, 1, 0}, {3, 2, 99}};
    for (int b = 0; b < 2; ++b) {
      for (int i = 0; i < counts[b]; ++i) {
        const int key = used[b] + i;
        for (std::int64_t h = 0; h < 2; ++h) {
          const Shape from = varlen ? Shape{b + i, h, 0} : Shape{b, h, i, 0};
          const Shape to = paged ? Shape{table[b][key / 3], key % 3, h, 0} : Shape{b, h, key, 0};
          const auto copy = [&](Tensor& cache, const Tensor& rows) {
            Shape source = from, place = to;
            for (std::int64_t d = 0; d < cache.size(3); ++d) {
              source.back() = place.back() = d;
              cache.set(place, rows.at(source));
            }
          };
          copy(want_k, k_new);
          copy(want_v, v_new);
        }
      }
    }
    FLASHCORE_EXPECT_SAME_BITS(k, want_k);
    FLASHCORE_EXPECT_SAME_BITS(v, want_v);
  }

  bool paged, varlen;
  Tensor k, v, k_new, v_new, used_k, block_table, cu_seqlens_new;
  AppendTensors tensors;
};

Status append_c(const AppendTensors& t, Workspace workspace) {
  const TensorView* views[] = {&t.k_new,       &t.v_new,         &t.k, &t.v, &t.seqused_k,
                               &t.block_table, &t.cu_seqlens_new};
  CTensor tensors[7];
  flashcore_append_params p{};
  const flashcore_tensor** slots[] = {&p.k_new,       &p.v_new,         &p.k, &p.v, &p.used_k,
                                      &p.block_table, &p.cu_seqlens_new};
  for (int i = 0; i < 7; ++i) {
    if (views[i]->rank == 0) continue;
    tensors[i].set(*views[i]);
    *slots[i] = &tensors[i].tensor;
  }
  p.struct_size = sizeof p;
  p.workspace = workspace.data;
  p.workspace_bytes = workspace.bytes;
  flashcore_error error{};
  const std::int32_t code = flashcore_append(&p, &error);
  EXPECT_EQ(code, error.code);
  return Status(static_cast<StatusCode>(code), error.message);
}

TEST(Append, WritesTheNewRowsAndNothingElse) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    for (int layout = 0; layout < verify::kMemoryLayouts; ++layout) {
      for (const bool paged : {false, true}) {
        for (const bool varlen : {false, true}) {
          for (const bool through_c : {false, true}) {
            SCOPED_TRACE(testing::Message()
                         << to_string(dtype) << " layout " << layout << (paged ? " paged" : "")
                         << (varlen ? " varlen" : "") << (through_c ? " C" : ""));
            AppendCall call(paged, varlen, dtype, static_cast<MemoryLayout>(layout));
            const Tensor k = call.k, v = call.v;
            const Status status = through_c ? append_c(call.tensors, {}) : append(call.tensors);
            ASSERT_TRUE(status.ok()) << status.message();
            call.expect_appended(k, v);
          }
        }
      }
    }
  }
}

TEST(Append, AcceptsEmptyTensors) {
  AppendCall call(true);
  const Tensor k = call.k, v = call.v;
  call.tensors.k_new.shape[2] = call.tensors.v_new.shape[2] = 0;
  EXPECT_TRUE(append(call.tensors).ok());
  AppendCall empty(true);
  empty.tensors.k_new.shape[0] = empty.tensors.v_new.shape[0] = 0;
  empty.tensors.seqused_k.shape[0] = empty.tensors.block_table.shape[0] = 0;
  EXPECT_TRUE(append(empty.tensors).ok());
  FLASHCORE_EXPECT_SAME_BITS(call.k, k);
  FLASHCORE_EXPECT_SAME_BITS(call.v, v);
}

// Rows of a varlen tensor before the first and after the last sequence are ignored. A sequence may
// get no keys.
TEST(Append, IgnoresVarlenRowsOutsideAllSequences) {
  AppendCall call(false, true);
  call.cu_seqlens_new = ints({1, 1, 2});
  call.refresh();
  const Tensor k = call.k;
  ASSERT_TRUE(append(call.tensors).ok());
  Tensor want = k;
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t d = 0; d < 16; ++d) want.set({1, h, 2, d}, call.k_new.at({1, h, d}));
  }
  FLASHCORE_EXPECT_SAME_BITS(call.k, want);
}

struct BadAppend {
  const char* name;
  bool paged, varlen;
  std::function<void(AppendCall&)> corrupt;
  std::vector<std::string> words;
  StatusCode code = StatusCode::invalid_argument;
};

void expect_refused(const std::vector<BadAppend>& rows, bool reported) {
  WorkspaceMemory workspace(kWorkspaceHeaderBytes);
  for (const BadAppend& row : rows) {
    for (const bool through_c : {false, true}) {
      SCOPED_TRACE(std::string(row.name) + (through_c ? " (C)" : ""));
      AppendCall call(row.paged, row.varlen);
      row.corrupt(call);
      const Tensor k = call.k, v = call.v;
      const Status status = through_c ? append_c(call.tensors, workspace.get())
                                      : append(call.tensors, workspace.get());
      EXPECT_EQ(status.code(), row.code) << status.message();
      for (const std::string& word : row.words) {
        EXPECT_NE(status.message().find(word), std::string::npos)
            << "no \"" << word << "\" in: " << status.message();
      }
      FLASHCORE_EXPECT_SAME_BITS(call.k, k);
      FLASHCORE_EXPECT_SAME_BITS(call.v, v);
      const Status found = workspace_status(workspace.get());
      EXPECT_EQ(found.message(), reported ? status.message() : "");
      EXPECT_TRUE(workspace_status(workspace.get()).ok());
    }
  }
}

void set_int(const TensorView& t, int index, std::int32_t value) {
  static_cast<std::int32_t*>(t.data)[index] = value;
}

TEST(Append, RejectsAndReportsBadValues) {
  expect_refused({{"a negative length",
                   false,
                   false,
                   [](AppendCall& c) { set_int(c.tensors.seqused_k, 1, -1); },
                   {"seqused_k[1] is -1"}},
                  {"a length past the capacity",
                   false,
                   false,
                   [](AppendCall& c) { set_int(c.tensors.seqused_k, 0, 10); },
                   {"seqused_k[0] is 10"}},
                  {"new rows past the capacity",
                   false,
                   false,
                   [](AppendCall& c) { set_int(c.tensors.seqused_k, 1, 7); },
                   {"seqused_k[1]", "sequence 1 has 10", "more pages (or rows)"}},
                  {"new rows past the last page",
                   true,
                   false,
                   [](AppendCall& c) { set_int(c.tensors.seqused_k, 0, 8); },
                   {"seqused_k[0]", "sequence 0 has 11"}},
                  {"a page id out of range",
                   true,
                   false,
                   [](AppendCall& c) { set_int(c.tensors.block_table, 2, 5); },
                   {"block_table[0, 2] is 5", "page ids"}},
                  {"an unassigned page",
                   true,
                   false,
                   [](AppendCall& c) { set_int(c.tensors.seqused_k, 1, 6); },
                   {"block_table[1, 2] is 99"}},
                  {"decreasing ends",
                   true,
                   true,
                   [](AppendCall& c) { set_int(c.tensors.cu_seqlens_new, 2, 0); },
                   {"cu_seqlens_new[2] is 0"}},
                  {"ends past the rows",
                   true,
                   true,
                   [](AppendCall& c) { set_int(c.tensors.cu_seqlens_new, 2, 4); },
                   {"cu_seqlens_new[2] is 4", "total_new"}}},
                 true);
}

// append() reads only the table entries of pages that get new keys.
TEST(Append, IgnoresOtherPages) {
  AppendCall call(true);
  set_int(call.tensors.block_table, 0, -7);
  const Tensor k = call.k, v = call.v;
  ASSERT_TRUE(append(call.tensors).ok());
  call.expect_appended(k, v);
}

TEST(Append, RejectsBadTensors) {
  const auto unsupported = StatusCode::unsupported;
  expect_refused(
      {{"no cache", false, false, [](AppendCall& c) { c.tensors.k = {}; }, {"k: not given"}},
       {"no lengths",
        false,
        false,
        [](AppendCall& c) { c.tensors.seqused_k = {}; },
        {"seqused_k: not given", "before the append"}},
       {"no new values",
        false,
        false,
        [](AppendCall& c) { c.tensors.v_new = {}; },
        {"v_new: not given"}},
       {"integers",
        false,
        false,
        [](AppendCall& c) { c.tensors.k.dtype = DType::i32; },
        {"k: dtype is i32"}},
       {"new rows of another type",
        false,
        false,
        [](AppendCall& c) { c.tensors.k_new.dtype = DType::f16; },
        {"k_new: dtype is f16", "f32"}},
       {"values of another type",
        false,
        false,
        [](AppendCall& c) { c.tensors.v.dtype = DType::bf16; },
        {"v: dtype is bf16", "f32"}},
       {"new rows with another dim",
        false,
        false,
        [](AppendCall& c) { c.tensors.v_new.shape[3] = 11; },
        {"v_new:", "11", "12"}},
       {"another number of heads",
        false,
        false,
        [](AppendCall& c) { c.tensors.k_new.shape[1] = 1; },
        {"k_new: kv_heads is 1", "2"}},
       {"fewer new values than keys",
        false,
        false,
        [](AppendCall& c) { c.tensors.v_new.shape[2] = 2; },
        {"v_new: new_len is 2", "3"}},
       {"new rows of another batch",
        false,
        false,
        [](AppendCall& c) { c.tensors.k_new.shape[0] = c.tensors.v_new.shape[0] = 1; },
        {"k_new: batch is 1", "2"}},
       {"a cache of another batch",
        false,
        false,
        [](AppendCall& c) { c.tensors.k.shape[0] = 1; },
        {"k: batch is 1", "seqused_k"}},
       {"varlen rows without cu_seqlens_new",
        false,
        true,
        [](AppendCall& c) { c.tensors.cu_seqlens_new = {}; },
        {"k_new: rank is 3", "new_len"}},
       {"ends of another batch",
        false,
        true,
        [](AppendCall& c) { c.tensors.cu_seqlens_new.shape[0] = 2; },
        {"cu_seqlens_new:", "2"}},
       {"pages that are too large",
        true,
        false,
        [](AppendCall& c) { c.tensors.k.shape[1] = c.tensors.v.shape[1] = 300; },
        {"k: page_size is 300"},
        unsupported},
       {"a cache that overlaps itself",
        false,
        false,
        [](AppendCall& c) { c.tensors.k.strides[0] = 0; },
        {"k:", "overlap"}},
       {"k and v share memory",
        false,
        false,
        [](AppendCall& c) { c.tensors.v.data = c.tensors.k.data; },
        {"v: shares memory with k"}},
       {"new rows are part of the cache",
        false,
        false,
        [](AppendCall& c) { c.tensors.k_new.data = c.tensors.k.data; },
        {"k: shares memory with the input k_new"}},
       {"a null pointer",
        false,
        false,
        [](AppendCall& c) { c.tensors.v_new.data = nullptr; },
        {"v_new: the pointer is null"}},
       {"page ids on another device",
        true,
        false,
        [](AppendCall& c) {
          c.tensors.block_table.device = {DeviceType::cuda, 1};
        },
        {"block_table: is on cuda:1", "k is on cpu:0"}}},
      false);
}

TEST(Append, RejectsBadWorkspacesAndStructs) {
  AppendCall call(true);
  WorkspaceMemory memory(kWorkspaceHeaderBytes);
  Workspace workspace = memory.get();
  workspace.bytes -= 1;
  EXPECT_NE(append(call.tensors, workspace).message().find("workspace: has"), std::string::npos);
  workspace = memory.get();
  workspace.device = {DeviceType::cuda, 0};
  EXPECT_NE(append(call.tensors, workspace).message().find("k is on cpu:0"), std::string::npos);
  flashcore_append_params p{};
  flashcore_error error{};
  EXPECT_EQ(flashcore_append(&p, &error), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("struct_size is 0"), std::string::npos);
  EXPECT_EQ(flashcore_append(nullptr, &error), FLASHCORE_INVALID_ARGUMENT);
}

// A GPU kernel cannot return an error. For any values it skips a row or writes inside the cache.
TEST(Append, ArbitraryValuesStayInsideTheCache) {
  Random random(3);
  const auto arbitrary = [&](std::int64_t most) {
    const std::int32_t any[] = {INT32_MIN, -1, INT32_MAX};
    return random.chance(0.4) ? random.pick(any)
                              : static_cast<std::int32_t>(random.between(-2, most + 2));
  };
  std::int64_t written = 0;
  for (int n = 0; n < rounds(20000); ++n) {
    std::int32_t used[3], ends[4], table[12];
    for (std::int32_t& x : used) x = arbitrary(12);
    for (std::int32_t& x : ends) x = arbitrary(6);
    for (std::int32_t& x : table) x = arbitrary(9);
    core::AppendParams p{};
    p.batch = 3, p.kv_heads = 2, p.new_len = 6;
    p.used_k = used, p.used_k_stride = 1;
    const bool paged = random.chance(0.5), varlen = random.chance(0.5);
    if (varlen) p.cu_seqlens_new = ends;
    if (paged) p.pages = {table, 4, 3, core::page_shift(3), 9};
    p.capacity = 12;
    for (std::int64_t index = 0; index < core::append_rows(p); ++index) {
      const core::AppendRow row = core::append_row(p, index);
      if (row.skipped) continue;
      ++written;
      ASSERT_TRUE(row.head == 0 || row.head == 1);
      ASSERT_GE(row.from.row, 0);
      ASSERT_LT(row.from.row, 6);
      ASSERT_GE(row.from.block, 0);
      ASSERT_LT(row.from.block, varlen ? 1 : 3);
      ASSERT_GE(row.to.row, 0);
      ASSERT_LT(row.to.row, paged ? 3 : 12);
      ASSERT_GE(row.to.block, 0);
      ASSERT_LT(row.to.block, paged ? 9 : 3);
    }
  }
  EXPECT_GT(written, 0);
}

}  // namespace
}  // namespace flashcore::test
