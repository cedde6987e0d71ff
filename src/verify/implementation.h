// The implementation under test, as the probes see it: they give values, and get values back.
// Memory (formats, strides, guard bands, poison) is this file's matter.
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

/// Where calls go. All tensors of a call lie in one block, so that a copy of the block elsewhere
/// (on a device, in another process) is the same call there.
class CallTarget {
 public:
  virtual ~CallTarget() = default;
  /// Memory for the next call, 256-byte aligned; it stays valid until the next block().
  virtual std::byte* block(std::size_t bytes) = 0;
  /// The call's pointers lie in the block.
  virtual std::int32_t call(const flashcore_verify_call& call, std::string* message) = 0;
  /// Whether a call just ended the implementation's process (it crashed or hung): what *message
  /// then says is a fault, not a refusal.
  virtual bool died() const { return false; }
};

/// Sizes of a call.
struct Shape {
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1, q_len = 1, kv_len = 1, head_dim = 64,
               v_dim = 64;
};
std::string to_string(const Shape& shape);

/// How a call is put into memory.
struct Setting {
  MemoryLayout inputs{}, out{};
  double guard = 0;  ///< what lies between and around the tensors
  bool lse = false;
  double out_before = std::nan("");  ///< what out holds before the call; NaN: the checks' poison
  /// 8-bit: factors of the scales, [batch, heads]; empty: 1.
  std::vector<double> q_factors, k_factors, v_factors;
  /// 8-bit: a scale of 1, so that the tensor's values are codes' values.
  bool q_unit_scale = false, k_unit_scale = false, v_unit_scale = false;
};

/// What came back.
struct CallResult {
  enum class Kind { ok, refused, failed, died, out_misshapen, lse_misshapen } kind = Kind::ok;
  std::string message;
  std::vector<double> out;      ///< [batch, q_heads, q_len, v_dim]
  std::vector<double> lse;      ///< [batch, q_heads, q_len], where asked for
  std::vector<std::byte> bits;  ///< of out and lse, as they lay in memory
  std::int64_t unwritten = 0, lse_unwritten = 0;
  std::vector<std::uint8_t> is_unwritten;  ///< per element of out
  std::string stray;                       ///< what was written besides the outputs; empty: nothing
  bool ok() const { return kind == Kind::ok; }
  /// A result came, but of another shape: no refusal, whatever was asked.
  bool misshapen() const { return kind == Kind::out_misshapen || kind == Kind::lse_misshapen; }
};

/// How the implementation computes, as far as it is known or declared.
struct ImplementationFormats {
  Format dtype = Format::f32, out = Format::f32;
  Format arithmetic = Format::f32;  ///< scores and P may be rounded to this
};

class Implementation {
 public:
  Implementation(CallTarget& target, ImplementationFormats formats, MemoryLayout native)
      : target_(target), formats_(formats), native_(native) {}

  /// Rounds the call's q, k and v to the format (so that the oracle sees what the implementation
  /// sees) and runs it.
  CallResult run(HostCall& call, const Setting& setting);
  CallResult run(HostCall& call) { return run(call, default_setting()); }

  /// The layout the caller declared, no guards to speak of.
  Setting default_setting() const {
    Setting s;
    s.inputs = s.out = native_;
    return s;
  }
  const ImplementationFormats& formats() const { return formats_; }
  /// Unit roundoffs the implementation may have, by its formats.
  Arithmetic arithmetic() const;
  std::int64_t calls() const { return calls_; }
  std::int64_t deaths() const { return deaths_; }  ///< calls that ended their process
  /// Shape and options of the call last run.
  const std::string& last_call() const { return last_call_; }
  /// Calls refused since forget_refusals(), and the first of them with its reason.
  std::int64_t refused() const { return refused_; }
  const std::string& first_refusal() const { return first_refusal_; }
  void forget_refusals() { refused_ = 0; }
  /// 8-bit: the scales of q, k and v in the call last run, before factors.
  const std::vector<double>& last_scales() const { return last_scales_; }
  /// The first call that wrote where it must not.
  const std::string& first_stray() const { return first_stray_; }
  const std::string& first_stray_call() const { return first_stray_call_; }

 private:
  CallTarget& target_;
  ImplementationFormats formats_;
  MemoryLayout native_;
  std::int64_t calls_ = 0, refused_ = 0, deaths_ = 0;
  std::vector<double> last_scales_;
  std::string last_call_, first_refusal_, first_stray_, first_stray_call_;
};

/// One line: sizes and options.
std::string describe(const HostCall& call);

}  // namespace flashcore::verify
