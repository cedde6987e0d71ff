#include "check/replay.h"

#include "cli/text.h"

namespace flashcore::tool {

std::string replay_case(const std::string& program, const char* command, const std::string& label,
                        const std::string& kernel, const DeviceArgs& device,
                        const std::string& cases_file, const RunControlArgs& control) {
  std::string text = formatted("{} {}", quoted(program), command);
  const auto option = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += formatted(" --{} {}", name, quoted(value));
  };
  option("cases", cases_file);
  option("case", label);
  option("kernel", formatted("^{}$", kernel));
  option("device", device.device);
  option("plan-for", device.plan_for);
  if (device.threads > 0) option("threads", std::to_string(device.threads));
  option("seed", std::to_string(control.seed));
  if (control.sigma) option("sigma", formatted("{}", *control.sigma));
  if (control.splits) option("splits", std::to_string(*control.splits));
  if (control.page_size > 0) option("page-size", std::to_string(control.page_size));
  if (control.deadline_s) option("deadline", formatted("{}", *control.deadline_s));
  return text;
}

}  // namespace flashcore::tool
