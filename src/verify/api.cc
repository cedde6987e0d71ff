// Entry points of the verifier, C++ and C.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "core/error.h"
#include "flashcore/attention.h"
#include "verify/probe_sequence.h"

struct flashcore_report {
  flashcore::VerifyReport report;
  std::string text, json, html;
};

namespace flashcore {
namespace {

/// Calls a function in this process.
class FunctionTarget final : public verify::CallTarget {
 public:
  FunctionTarget(const VerifyFunction& function, const VerifyBackwardFunction& backward)
      : function_(function), backward_(backward) {}

  std::byte* block(std::size_t bytes) override {
    memory_.reset();
    constexpr std::size_t kAlignment = 256;
    memory_.reset(static_cast<std::byte*>(
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment)));
    if (memory_ == nullptr) throw std::bad_alloc();
    return memory_.get();
  }

  std::int32_t call(const flashcore_verify_call& call, std::string* message) override {
    return function_(call, message);
  }

  bool has_backward() const override { return static_cast<bool>(backward_); }
  std::int32_t call_backward(const flashcore_verify_backward_call& call,
                             std::string* message) override {
    return backward_(call, message);
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  const VerifyFunction& function_;
  VerifyBackwardFunction backward_;
  std::unique_ptr<std::byte, Free> memory_;
};

/// The size of the struct today, or as of 0.1.0, without the fields of the backward pass.
bool is_size_of_options(std::size_t size) {
  return size == sizeof(flashcore_verify_options) ||
         size == offsetof(flashcore_verify_options, backward);
}

flashcore_verify_options default_options() {
  flashcore_verify_options o{};
  o.struct_size = sizeof o;
  o.seed = 1;
  o.gqa = o.batch = o.cross = o.causal = o.window = o.scale = o.softcap = o.splits = o.lse =
      o.strides = o.v_dim = o.dlse = -1;
  return o;
}

std::int32_t finish(const Status& status, flashcore_error* error) {
  if (error != nullptr) {
    error->code = static_cast<std::int32_t>(status.code());
    std::snprintf(error->message, sizeof error->message, "%s", status.message().c_str());
  }
  return static_cast<std::int32_t>(status.code());
}

}  // namespace

Result<VerifyReport> verify_attention(const flashcore_verify_options& options,
                                      const VerifyFunction& function,
                                      const VerifyBackwardFunction& backward) {
  VerifyBackwardFunction of_options;
  if (options.backward != nullptr) {
    of_options = [&](const flashcore_verify_backward_call& call, std::string*) {
      return options.backward(&call, options.backward_user);
    };
  }
  FunctionTarget target(function, backward ? backward : of_options);
  return verify::run_probes(options, target);
}

}  // namespace flashcore

extern "C" {

void flashcore_verify_options_init(flashcore_verify_options* o, size_t struct_size) {
  if (o == nullptr || !flashcore::is_size_of_options(struct_size)) return;
  flashcore_verify_options all = flashcore::default_options();
  all.struct_size = struct_size;
  std::memcpy(o, &all, struct_size);
}

int32_t flashcore_verify(const flashcore_verify_options* options,
                         flashcore_verify_function function, void* user, flashcore_report** report,
                         flashcore_error* error) {
  using namespace flashcore;
  const auto body = [&]() -> Status {
    if (options == nullptr || function == nullptr || report == nullptr) {
      return invalid_argument("options, function or report is NULL");
    }
    *report = nullptr;
    if (!is_size_of_options(options->struct_size)) {
      return invalid_argument(
          "options: struct_size is %zu; library version %s expects %zu; compile the caller against "
          "its verify_c.h",
          options->struct_size, version(), sizeof *options);
    }
    flashcore_verify_options all = default_options();
    std::memcpy(&all, options, options->struct_size);
    const Result<VerifyReport> result = verify_attention(
        all,
        [&](const flashcore_verify_call& call, std::string*) { return function(&call, user); });
    if (!result.ok()) return result.status();
    auto made = std::make_unique<flashcore_report>();
    made->report = *result;
    made->text = to_text(made->report);
    made->json = to_json(made->report);
    made->html = to_html(made->report);
    *report = made.release();
    return {};
  };
  try {
    return finish(body(), error);
  } catch (const std::bad_alloc&) {
    return finish(out_of_memory(), error);
  } catch (const std::exception& e) {
    return finish(Status(StatusCode::internal, e.what()), error);
  }
}

int32_t flashcore_report_ok(const flashcore_report* r) { return r->report.ok ? 1 : 0; }
const char* flashcore_report_stage(const flashcore_report* r) { return to_string(r->report.stage); }
const char* flashcore_report_text(const flashcore_report* r) { return r->text.c_str(); }
const char* flashcore_report_json(const flashcore_report* r) { return r->json.c_str(); }
const char* flashcore_report_html(const flashcore_report* r) { return r->html.c_str(); }
void flashcore_report_free(flashcore_report* r) { delete r; }

}  // extern "C"
