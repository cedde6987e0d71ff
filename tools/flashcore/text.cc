#include "text.h"

#include <fmt/format.h>

namespace flashcore::tool {

std::string format_arguments(fmt::string_view format, fmt::format_args arguments) {
  return fmt::vformat(format, arguments);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace flashcore::tool
