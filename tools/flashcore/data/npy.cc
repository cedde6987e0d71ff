#include "data/npy.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>

#include "cli/text.h"
#include "command_error.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::tool {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::int64_t kMaxExtent = INT32_MAX;  // limit of the library

Status bad(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

struct Header {
  std::optional<std::string_view> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;
};

/// Parses the header, a Python dictionary with three known keys.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  Result<Header> parse() {
    Header header;
    if (!take('{')) return bad("the header is not a dictionary");
    while (!take('}')) {
      const std::optional<std::string_view> key = string();
      if (!key || !take(':')) return bad("the header is not a dictionary of named fields");
      if (Status status = field(*key, header); !status.ok()) return status;
      if (!take(',') && peek() != '}') return bad("the header lacks a comma or a closing brace");
    }
    skip_spaces();
    if (!text_.empty()) return bad("the header continues after its dictionary");
    if (!header.descr || !header.fortran_order || !header.shape) {
      return bad("the header lacks one of descr, fortran_order and shape");
    }
    return header;
  }

 private:
  Status field(std::string_view key, Header& header) {
    if (key == "descr" && !header.descr) {
      if (peek() == '[') return bad("structured arrays are not supported; save a plain array");
      header.descr = string();
      return header.descr ? Status{} : bad("descr is not a string");
    }
    if (key == "fortran_order" && !header.fortran_order) {
      header.fortran_order = boolean();
      return header.fortran_order ? Status{} : bad("fortran_order is neither True nor False");
    }
    if (key == "shape" && !header.shape) return shape(header);
    return bad("the header has an unknown or a repeated field");
  }

  Status shape(Header& header) {
    std::vector<std::int64_t> extents;
    if (!take('(')) return bad("shape is not a tuple");
    while (!take(')')) {
      const std::optional<std::int64_t> extent = integer();
      if (!extent) return bad(formatted("an extent is not a number from 0 to {}", kMaxExtent));
      extents.push_back(*extent);
      if (extents.size() > TensorView::kMaxRank) {
        return bad(formatted("the array has more than {} dimensions", TensorView::kMaxRank));
      }
      if (!take(',') && peek() != ')') return bad("shape lacks a comma or a closing parenthesis");
    }
    header.shape = std::move(extents);
    return {};
  }

  void skip_spaces() {
    const std::size_t first = text_.find_first_not_of(" \t\r\n");
    text_.remove_prefix(first == std::string_view::npos ? text_.size() : first);
  }
  char peek() {
    skip_spaces();
    return text_.empty() ? '\0' : text_.front();
  }
  bool take(char wanted) {
    if (peek() != wanted || text_.empty()) return false;
    text_.remove_prefix(1);
    return true;
  }

  std::optional<std::string_view> string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') return std::nullopt;
    const std::size_t end = text_.find(quote, 1);
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view content = text_.substr(1, end - 1);
    text_.remove_prefix(end + 1);
    return content;
  }

  std::optional<bool> boolean() {
    skip_spaces();
    for (const auto& [word, value] :
         {std::pair{std::string_view("True"), true}, {"False", false}}) {
      if (text_.starts_with(word)) {
        text_.remove_prefix(word.size());
        return value;
      }
    }
    return std::nullopt;
  }

  /// 0 … kMaxExtent. Python 2 appended an L.
  std::optional<std::int64_t> integer() {
    skip_spaces();
    std::int64_t value = 0;
    std::size_t digits = 0;
    while (digits < text_.size() && text_[digits] >= '0' && text_[digits] <= '9') {
      value = 10 * value + (text_[digits] - '0');
      if (value > kMaxExtent) return std::nullopt;
      ++digits;
    }
    if (digits == 0) return std::nullopt;
    text_.remove_prefix(digits);
    if (!text_.empty() && text_.front() == 'L') text_.remove_prefix(1);
    return value;
  }

  std::string_view text_;
};

Result<DType> dtype_of(std::string_view descr, bool two_bytes_are_bf16) {
  const bool has_order = !descr.empty() && std::strchr("<>=|", descr.front()) != nullptr;
  const char order = has_order ? descr.front() : '|';
  const std::string_view type = descr.substr(has_order ? 1 : 0);
  if (order == '>' && type != "b1" && type != "u1") {
    return bad("the array is big-endian; save it little-endian, e.g. a.astype(\"<f4\")");
  }
  if (type == "f2") return DType::f16;
  if (type == "f4") return DType::f32;
  if (type == "f8") return DType::f64;
  if (type == "i4") return DType::i32;
  if (type == "b1" || type == "u1") return DType::boolean;
  if (type == "V2" || (type == "u2" && two_bytes_are_bf16)) return DType::bf16;
  if (type == "u2") return bad("the array is uint16; use --dtype bf16 if these are bf16 bits");
  if (type == "i8") return bad("the array is int64; save it as a.astype(\"int32\")");
  std::string shown(descr.substr(0, 16));
  for (char& c : shown) c = c >= ' ' && c <= '~' ? c : '?';  // no control characters
  return bad(formatted(
      "the type is \"{}\"; wanted float16, float32, float64, int32, bool, uint8 or bf16 (V2)",
      shown));
}

/// Sets the strides, in elements, and returns the number of elements.
Result<std::int64_t> lay_out(bool fortran_order, NpyArray& array) {
  std::int64_t count = 1, reach = 1;
  for (int i = 0; i < array.rank; ++i) {
    const int axis = fortran_order ? i : array.rank - 1 - i;
    array.strides[axis] = reach;
    count *= array.shape[axis] == 0 ? 0 : 1;
    if (__builtin_mul_overflow(reach, std::max<std::int64_t>(array.shape[axis], 1), &reach)) {
      return bad("the shape has more elements than memory can hold");
    }
  }
  return count * reach;
}

const char* descr_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return "<f8";
    case DType::f32: return "<f4";
    case DType::f16: return "<f2";
    case DType::bf16: return "<V2";
    case DType::i32: return "<i4";
    case DType::int8: return "|i1";
    case DType::e4m3:
    case DType::e5m2:
    case DType::u8: return "|u1";
    default: return "|b1";
  }
}

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

}  // namespace

Result<NpyArray> parse_npy(std::span<const std::byte> file, bool two_bytes_are_bf16) {
  const auto byte = [&](std::size_t i) { return static_cast<std::size_t>(file[i]); };
  if (file.size() < 10 || std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    return bad("not a .npy file; write one with numpy.save()");
  }
  const std::size_t major = byte(6);
  if (major < 1 || major > 3) return bad(formatted(".npy version {} is not supported", major));
  const std::size_t begin = major == 1 ? 10 : 12;
  if (file.size() < begin) return bad("the file ends inside its header");
  std::size_t length = byte(8) | byte(9) << 8;
  if (major > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (length > file.size() - begin) return bad("the file ends inside its header");

  const auto* text = reinterpret_cast<const char*>(file.data() + begin);
  const Result<Header> header = HeaderParser(std::string_view(text, length)).parse();
  if (!header.ok()) return header.status();
  const Result<DType> dtype = dtype_of(*header->descr, two_bytes_are_bf16);
  if (!dtype.ok()) return dtype.status();
  NpyArray array;
  array.dtype = *dtype;
  array.rank = static_cast<int>(header->shape->size());
  if (array.rank == 0) return bad("the array is a single number; wanted 1 to 4 dimensions");
  std::copy(header->shape->begin(), header->shape->end(), array.shape);
  const Result<std::int64_t> count = lay_out(*header->fortran_order, array);
  if (!count.ok()) return count.status();

  const std::size_t have = file.size() - begin - length;
  const auto size = static_cast<std::size_t>(size_of(array.dtype));
  if (have % size != 0 || have / size != static_cast<std::size_t>(*count)) {
    return bad(formatted("the file has {} bytes of data, its shape needs {} elements of {}", have,
                         *count, size));
  }
  array.data = file.subspan(begin + length);
  return array;
}

std::vector<std::byte> to_npy(const TensorView& tensor) {
  std::string shape;
  for (int i = 0; i < tensor.rank; ++i) shape += formatted("{}, ", tensor.shape[i]);
  if (tensor.rank > 1) shape.resize(shape.size() - 2);  // (3,) keeps its comma
  std::string header = formatted("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
                                 descr_of(tensor.dtype), shape);
  header.append(63 - (10 + header.size()) % 64, ' ');  // data begins at a multiple of 64 bytes
  header += '\n';
  std::string file(kMagic);
  file += {'\x01', '\x00', static_cast<char>(header.size() & 0xff),
           static_cast<char>(header.size() >> 8)};
  file += header;

  std::vector<std::byte> bytes(file.size());
  std::memcpy(bytes.data(), file.data(), file.size());
  const auto size = static_cast<std::size_t>(size_of(tensor.dtype));
  const auto* data = static_cast<const std::byte*>(tensor.data);
  verify::for_each_element(tensor, [&](std::int64_t at) {
    const std::byte* element = data + static_cast<std::size_t>(at) * size;
    bytes.insert(bytes.end(), element, element + size);
  });
  return bytes;
}

std::vector<std::byte> read_file(const std::string& path) {
  const File file(std::fopen(path.c_str(), "rb"));
  if (!file) throw CommandError(formatted("{}: {}", path, std::strerror(errno)));
  std::vector<std::byte> bytes;
  std::size_t got = 0;
  do {  // in chunks, so that it allocates only for bytes that exist
    constexpr std::size_t kChunk = 4 << 20;
    const std::size_t end = bytes.size();
    bytes.resize(end + kChunk);
    got = std::fread(bytes.data() + end, 1, kChunk, file.get());
    bytes.resize(end + got);
  } while (got > 0);
  if (std::ferror(file.get()) != 0) {
    throw CommandError(formatted("{}: cannot be read: {}", path, std::strerror(errno)));
  }
  return bytes;
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  // Writes a temporary file and renames it, so that a reader sees the old or the new content, never
  // a part. Links, pipes and devices are written to directly.
  std::error_code ignored;
  const auto type = std::filesystem::symlink_status(path, ignored).type();
  const bool regular =
      type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::regular;
  const std::string target = regular ? path + ".part" : path;
  File file(std::fopen(target.c_str(), "wb"));
  bool ok = file && std::fwrite(bytes.data(), 1, bytes.size(), file.get()) == bytes.size();
  if (file) ok = std::fclose(file.release()) == 0 && ok;
  if (ok && regular) ok = std::rename(target.c_str(), path.c_str()) == 0;
  if (!ok) {
    const int error = errno;
    if (regular) std::remove(target.c_str());
    throw CommandError(formatted("{}: cannot be written: {}", path, std::strerror(error)));
  }
}

}  // namespace flashcore::tool
