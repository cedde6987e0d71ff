// The implementation under test. Probes pass and receive f64 values. This file handles memory:
// formats, strides, guard bands and poison.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashcore/verify.h"
#include "verify/inputs/call.h"
#include "verify/inputs/compare.h"
#include "verify/inputs/format.h"

namespace flashcore::verify {

/// Runs calls. All tensors of a call are in one block of memory, so a copy of the block on a device
/// or in another process is the same call.
class CallTarget {
 public:
  virtual ~CallTarget() = default;
  /// Memory for the next call, 256-byte aligned. Valid until the next block().
  virtual std::byte* block(std::size_t bytes) = 0;
  /// All pointers of the call are into the block.
  virtual std::int32_t call(const flashcore_verify_call& call, std::string* message) = 0;
  /// The backward pass, if there is one.
  virtual bool has_backward() const { return false; }
  virtual std::int32_t call_backward(const flashcore_verify_backward_call&, std::string* message) {
    *message = "there is no backward";
    return FLASHCORE_UNSUPPORTED;
  }
  /// True if the last call ended the process of the implementation (crash or hang). Its message is
  /// then a fault, not a refusal.
  virtual bool died() const { return false; }
};

/// Sizes of a call.
struct Shape {
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1, q_len = 1, kv_len = 1, head_dim = 64,
               v_dim = 64;
};
std::string to_string(const Shape& shape);

/// The memory of a call.
struct Setting {
  MemoryLayout inputs{}, out{};
  MemoryLayout of_rows{};  ///< of tensors with one number per row: LSE and dlse
  double guard = 0;        ///< value between and around the tensors
  bool lse = false;
  double out_before = std::nan("");  ///< content of the outputs before the call; NaN: poison
  /// 8-bit: factors on the scales, [batch, heads]; empty: 1.
  std::vector<double> q_factors, k_factors, v_factors;
  /// 8-bit: use a scale of 1, so that the values are the decoded encodings.
  bool q_unit_scale = false, k_unit_scale = false, v_unit_scale = false;
};

/// How a call ended.
struct CallOutcome {
  enum class Kind {
    ok,
    refused,
    failed,
    died,
    out_misshapen,
    lse_misshapen,
    gradient_misshapen
  } kind = Kind::ok;
  std::string message;
  std::string stray;  ///< address of a write outside the outputs; empty: none
  bool ok() const { return kind == Kind::ok; }
  /// The call returned a result of another shape. This is a fault, not a refusal.
  bool misshapen() const { return kind >= Kind::out_misshapen; }
};

struct CallResult : CallOutcome {
  std::vector<double> out;      ///< [batch, q_heads, q_len, v_dim]
  std::vector<double> lse;      ///< [batch, q_heads, q_len], if requested
  std::vector<std::byte> bits;  ///< out and lse as stored
  std::int64_t unwritten = 0, lse_unwritten = 0;
  std::vector<std::uint8_t> is_unwritten;  ///< per element of out
};

/// A call of the backward pass. The tensors of `forward` include its results.
struct GradientCall {
  HostCall forward;
  std::vector<double> dout;  ///< [batch, q_heads, q_len, v_dim]
  std::vector<double> dlse;  ///< [batch, q_heads, q_len]; empty: not given
};

enum GradientName { kDq, kDk, kDv };
inline constexpr int kGradients = 3;
inline constexpr const char* kGradientNames[] = {"dq", "dk", "dv"};

struct GradientResult : CallOutcome {
  std::vector<double> value[kGradients];  ///< in the shapes of q, k and v
  std::int64_t unwritten[kGradients] = {};
  std::vector<std::byte> bits;  ///< all gradients as stored
};

/// Number formats of the implementation, default or declared.
struct ImplementationFormats {
  Format dtype = Format::f32, out = Format::f32;
  Format arithmetic = Format::f32;  ///< scores and P may be rounded to this
};

class Block;

class Implementation {
 public:
  Implementation(CallTarget& target, ImplementationFormats formats, MemoryLayout native)
      : target_(target), formats_(formats), native_(native) {}

  /// Runs the call. Rounds q, k and v of the call to the format first, so that the oracle gets the
  /// same inputs.
  CallResult run(HostCall& call, const Setting& setting);
  CallResult run(HostCall& call) { return run(call, default_setting()); }
  /// Runs the backward pass. The inputs are already rounded to their formats.
  GradientResult run_backward(const GradientCall& call, const Setting& setting);
  bool has_backward() const { return target_.has_backward(); }

  /// The declared layout, guards of 0.
  Setting default_setting() const {
    Setting s;
    s.inputs = s.out = native_;
    return s;
  }
  const ImplementationFormats& formats() const { return formats_; }
  /// Unit roundoffs that the formats allow.
  Arithmetic arithmetic() const;
  std::int64_t calls() const { return calls_; }
  std::int64_t deaths() const { return deaths_; }  ///< calls that ended the process
  /// Shape and options of the last call.
  const std::string& last_call() const { return last_call_; }
  /// Number of calls refused since forget_refusals(), and the first of them with its reason.
  std::int64_t refused() const { return refused_; }
  const std::string& first_refusal() const { return first_refusal_; }
  void forget_refusals() { refused_ = 0; }
  /// 8-bit: scales of q, k and v in the last call, without factors.
  const std::vector<double>& last_scales() const { return last_scales_; }
  /// The first write outside the outputs, and its call.
  const std::string& first_stray() const { return first_stray_; }
  const std::string& first_stray_call() const { return first_stray_call_; }
  void forget_strays() { first_stray_.clear(), first_stray_call_.clear(); }

 private:
  struct PlacedCall;
  /// Counts a call and sets its kind and message. Returns false if it has no result.
  bool note_end(std::int32_t code, const char* reason, CallOutcome& result);
  void note_error(std::int32_t code, CallOutcome& result);
  void note_stray(const Block& block, const std::vector<std::byte>& before, const std::byte* base,
                  CallOutcome& result);

  CallTarget& target_;
  ImplementationFormats formats_;
  MemoryLayout native_;
  std::int64_t calls_ = 0, refused_ = 0, deaths_ = 0;
  std::vector<double> last_scales_;
  std::string last_call_, first_refusal_, first_stray_, first_stray_call_;
};

/// Bytes of the reason that a function may write.
inline constexpr std::size_t kReasonBytes = 512;

/// A call with its options and without tensors.
flashcore_verify_call options_of(const HostCall& call);

/// Sizes and options in one line.
std::string describe(const HostCall& call);
std::string describe(const GradientCall& call);

}  // namespace flashcore::verify
