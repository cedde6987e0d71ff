#include "plan/problem_line.h"

#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>

namespace flashcore {
namespace {

using ll = long long;

/// std::to_string would add symbols to the library's exports.
std::string decimal(std::int64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld", ll{value});
  return text;
}

/// A line of distinct words.
class Words {
 public:
  explicit Words(std::string line) : line_(std::move(line)) {}

  void add(const std::string& word) {
    if (word.empty() || (line_ + "  ").find("  " + word + "  ") != std::string::npos) return;
    line_ += "  " + word;
  }
  void add(const char* name, double value) {
    char text[64];
    std::snprintf(text, sizeof text, "%s %g", name, value);
    if (*name != '\0') add(std::string(text));
  }
  const std::string& line() const { return line_; }

 private:
  std::string line_;
};

// Adds an option that differs from its initial value. One overload per option type of options.def.
void add_option(Words& words, const char* word, bool value, bool initial) {
  if (value != initial) words.add(std::string(word));
}
template <typename Number>
void add_option(Words& words, const char* word, Number value, Number initial) {
  if (value != initial) words.add(word, static_cast<double>(value));
}

std::string sizes(const Problem& p) {
  std::string types = to_string(p.q.dtype);
  if (p.q.dtype != p.k.dtype || p.q.dtype != p.v.dtype) {
    types = std::string("q ") + to_string(p.q.dtype) + " k " + to_string(p.k.dtype) + " v " +
            to_string(p.v.dtype);
  }
  char text[256];
  std::snprintf(
      text, sizeof text,
      "%s  batch %lld  q_heads %lld  kv_heads %lld  q_len %lld  kv_len %lld  head_dim %lld",
      types.c_str(), ll{p.batch}, ll{p.q_heads}, ll{p.kv_heads}, ll{p.q_len}, ll{p.kv_len},
      ll{p.head_dim});
  std::string line = text;
  if (p.v_dim != p.head_dim) line += "  v_dim " + decimal(p.v_dim);
  return line;
}

}  // namespace

std::string problem_line(const Problem& p) {
  Words words(sizes(p));
  const Options& o = p.options;
  if (o.window_left >= 0 || o.window_right >= 0) {
    words.add("window (" + decimal(o.window_left) + ", " + decimal(o.window_right) + ")");
  }
  if (p.page_size > 0) words.add("pages of " + decimal(p.page_size) + " keys");
  if (o.reproducibility == Reproducibility::batch_invariant) words.add("batch-invariant");
  if (p.q_varlen || p.kv_varlen) words.add("variable lengths");  // offsets have no Layout

#define FLASHCORE_WORD_flag(name, initial, word) add_option(words, word, o.name, initial);
#define FLASHCORE_WORD_f64(name, initial, word) add_option(words, word, o.name, double{initial});
#define FLASHCORE_WORD_i32(name, initial, word) add_option(words, word, o.name, initial);
#define FLASHCORE_WORD_i64(name, initial, word) \
  add_option(words, word, o.name, std::int64_t{initial});
#define FLASHCORE_WORD_optional_f64(name, initial, word) \
  if (o.name.has_value()) words.add(word, *o.name);
#define FLASHCORE_WORD_window(name, initial, word)
#define FLASHCORE_WORD_choice(name, initial, word)
#define FLASHCORE_WORD_text(name, initial, word)
#define FLASHCORE_OPTION(name, type, initial, least, wanted, role, word, doc) \
  FLASHCORE_WORD_##type(name, initial, word)

#define FLASHCORE_WORD_main(name, word)
#define FLASHCORE_WORD_offsets(name, word)
#define FLASHCORE_WORD_output(name, word) \
  if (p.name.given()) words.add(std::string(word));
#define FLASHCORE_WORD_optional(name, word) \
  if (p.name.given()) words.add(std::string(word));
#define FLASHCORE_WORD_scale(name, word)
#define FLASHCORE_WORD_block_mask(name, word) FLASHCORE_WORD_optional(name, word)
#define FLASHCORE_TENSOR(field, name, shape, type, role, word, doc) \
  FLASHCORE_WORD_##role(name, word)
#include "api/options.def"
  return words.line();
}

std::string device_line(const DeviceInfo& d) {
  char text[128];
  if (d.device.type == DeviceType::cpu) {
    std::snprintf(text, sizeof text, "%s (%s, %d threads)", d.name, to_string(d.isa), d.threads);
  } else {
    std::snprintf(text, sizeof text, "%s (sm_%d, %d SMs, %d KiB shared memory per CTA)", d.name,
                  d.compute_capability, d.sm_count, d.smem_per_block_bytes / 1024);
  }
  return text;
}

}  // namespace flashcore
