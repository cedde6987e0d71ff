// Makes .npy files, for tests of the reader.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

namespace flashcore::tool {

/// A file of the given version with this header text. The data bytes count up.
inline std::vector<std::byte> npy_bytes(const std::string& header, std::size_t data_bytes,
                                        int major = 1) {
  std::string file = std::string("\x93NUMPY") + static_cast<char>(major) + '\0';
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) {
    file += static_cast<char>(header.size() >> (8 * i) & 0xff);
  }
  file += header;
  for (std::size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  std::vector<std::byte> bytes(file.size());
  std::memcpy(bytes.data(), file.data(), file.size());
  return bytes;
}

inline std::string npy_header(const std::string& descr, const std::string& shape,
                              bool fortran_order = false) {
  return "{'descr': '" + descr + "', 'fortran_order': " + (fortran_order ? "True" : "False") +
         ", 'shape': " + shape + ", }\n";
}

}  // namespace flashcore::tool
