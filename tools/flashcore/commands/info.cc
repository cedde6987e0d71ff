// flashcore info: prints version, devices, kernels and source fingerprints.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <sstream>

#include "cli/json_output.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "command_error.h"
#include "commands.h"
#include "data/devices.h"

namespace flashcore::tool {
namespace {

using Fingerprints = std::map<std::string, std::string>;  // by name: "tree" or a family

Fingerprints own_fingerprints() {
  Fingerprints found{{"tree", source_fingerprint()}};
  for (const KernelInfo& kernel : kernels()) {
    found[kernel.family_name()] = source_fingerprint(kernel.family_name());
  }
  return found;
}

/// Runs a program, which must succeed, and returns its standard output. Uses no shell, so that the
/// path needs no quoting.
std::string output_of(const std::string& program, const char* argument) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw CommandError("cannot create a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::string name = program, option = argument;
  char* arguments[] = {name.data(), option.data(), nullptr};
  pid_t child = 0;
  const int error = posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  char buffer[4096];
  ssize_t got = 0;
  while ((got = read(ends[0], buffer, sizeof buffer)) > 0 || (got < 0 && errno == EINTR)) {
    if (got > 0) text.append(buffer, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = -1;
  if (error == 0) {
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  if (error != 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw CommandError(formatted("cannot run {}{}{}; is --tree a FlashCore source tree?", program,
                                 error != 0 ? ": " : "", error != 0 ? std::strerror(error) : ""));
  }
  return text;
}

Fingerprints fingerprints_of_tree(const std::string& tree) {
  std::istringstream lines(output_of(tree + "/scripts/fingerprint", "--families"));
  Fingerprints found;
  for (std::string name, hash; lines >> name >> hash;) found[name] = hash;
  if (!found.contains("tree")) {
    throw CommandError(formatted("{}/scripts/fingerprint printed no fingerprint", tree));
  }
  return found;
}

/// Names whose hashes differ. This binary is stale if "tree" is one of them.
std::vector<std::string> differences(const Fingerprints& own, const Fingerprints& tree) {
  std::vector<std::string> names;
  for (const auto& [name, hash] : tree) {
    const auto mine = own.find(name);
    if (mine == own.end() || mine->second != hash) names.push_back(name);
  }
  return names;
}

/// Resources of a CUDA kernel from the driver; none if the kernel does not run here.
std::optional<KernelResources> resources_of(const KernelInfo& kernel,
                                            const std::vector<Target>& targets) {
  for (const Target& target : targets) {
    if (kernel.device != target.device.type || !runnable(kernel, target.real)) continue;
    const Result<KernelResources> found = target.backend->resources(kernel, target.device.index);
    if (found.ok()) return *found;
  }
  return std::nullopt;
}

bool runs_here(const KernelInfo& kernel, const std::vector<Target>& targets) {
  for (const Target& target : targets) {
    if (runnable(kernel, target.real)) return true;
  }
  return false;
}

std::string kernel_table(const std::vector<Target>& targets) {
  Table table({"kernel", "device", "dtype", ">dims", ">tile", ">smem", "built", "runs", ">regs",
               ">spill", ">CTAs/SM", ">occupancy"});
  for (const KernelInfo& k : kernels()) {
    const bool gpu = k.device == DeviceType::cuda;
    std::vector<std::string> cells = {
        k.id,
        to_string(k.device),
        to_string(k.dtype),
        k.v_dim == k.head_dim ? formatted("{}", k.head_dim)
                              : formatted("{}/{}", k.head_dim, k.v_dim),
        gpu ? formatted("{}x{}", k.tile_q, k.tile_k) : formatted("{}x*", k.tile_q),
        gpu ? formatted("{}", k.smem_bytes) : "-",
        k.compiled ? "yes" : "no",
        runs_here(k, targets) ? green("yes") : "no"};
    if (const auto r = gpu ? resources_of(k, targets) : std::nullopt) {
      cells.insert(cells.end(),
                   {formatted("{}", r->registers), formatted("{}", r->local_bytes),
                    formatted("{}", r->blocks_per_sm), formatted("{:.0f} %", 100 * r->occupancy)});
    } else {
      cells.insert(cells.end(), {"-", "-", "-", "-"});
    }
    table.add(std::move(cells));
  }
  return table.text() +
         "tile: query rows x keys; on a CPU the keys depend on the dims (x*). smem: bytes per CTA. "
         "regs,\nspill: registers and bytes per thread, from the driver.\n";
}

Json kernel_list(const std::vector<Target>& targets) {
  Json list = Json::array();
  for (const KernelInfo& kernel : kernels()) {
    Json row = to_json(kernel);
    row["runs_here"] = runs_here(kernel, targets);
    if (kernel.device == DeviceType::cuda) {
      if (const auto r = resources_of(kernel, targets)) {
        row["registers"] = r->registers;
        row["shared_bytes"] = r->shared_bytes;
        row["local_bytes"] = r->local_bytes;
        row["blocks_per_sm"] = r->blocks_per_sm;
        row["occupancy"] = r->occupancy;
      }
    }
    list.push_back(std::move(row));
  }
  return list;
}

std::string rates_line(const DeviceInfo& d) {
  std::string text =
      formatted("{:.4g} TFLOP/s f32 FMA, {:.4g} GB/s memory", d.f32_tflops, d.memory_gbs);
  if (d.tensor16_tflops > 0)
    text += formatted(", {:.4g} TFLOP/s 16-bit tensor cores", d.tensor16_tflops);
  return text;
}

std::vector<Target> all_targets(bool measure) {
  std::vector<Target> targets{find_target({.device = "cpu", .plan_for = {}, .threads = 0})};
  for (int i = 0; i < cuda_availability().device_count; ++i) {
    targets.push_back(
        find_target({.device = formatted("cuda:{}", i), .plan_for = {}, .threads = 0}));
  }
  for (Target& target : targets) {
    if (!measure) continue;
    if (const Status status = measure_rates(target.real); !status.ok()) throw CommandError(status);
  }
  return targets;
}

void print_text(const InfoArgs& args, const std::vector<Target>& targets,
                const Fingerprints& fingerprints) {
  print_out("flashcore {}\n", version());
  print_out("source      {:16} whole library\n", fingerprints.at("tree"));
  for (const auto& [name, hash] : fingerprints) {
    if (name == "tree") continue;
    print_out("source      {:16} {} kernels\n", hash, name);
  }
  for (const Target& target : targets) {
    const DeviceInfo& d = target.real;
    if (d.device.type == DeviceType::cpu) {
      print_out("cpu         {}, {} thread{}, instruction set {}\n", d.name, d.threads,
                d.threads == 1 ? "" : "s", to_string(d.isa));
    } else {
      print_out("cuda:{}      {}, sm_{}, {} SMs, {} KiB shared memory per CTA\n", d.device.index,
                d.name, d.compute_capability, d.sm_count, d.smem_per_block_bytes / 1024);
    }
    if (args.peak) print_out("  peak      {}\n", rates_line(d));
  }
  const CudaAvailability cuda = cuda_availability();
  if (cuda.device_count == 0) print_out("cuda        not used: {}\n", cuda.reason);
  if (args.kernels) print_out("\n{}", kernel_table(targets));
}

}  // namespace

int run_info(const InfoArgs& args) {
  const std::vector<Target> targets = all_targets(args.peak);
  const Fingerprints own = own_fingerprints();
  Fingerprints tree;
  if (!args.tree.empty()) tree = fingerprints_of_tree(args.tree);
  const std::vector<std::string> changed = differences(own, tree);
  const bool stale = std::find(changed.begin(), changed.end(), "tree") != changed.end();

  if (args.json) {
    Json families = own;
    families.erase("tree");
    const CudaAvailability cuda = cuda_availability();
    Json json = {
        {"version", version()}, {"versions", versions()},          {"fingerprint", own.at("tree")},
        {"families", families}, {"cpu", to_json(targets[0].real)}, {"cuda", Json::object()}};
    json["cuda"]["device_count"] = cuda.device_count;
    if (cuda.device_count == 0) json["cuda"]["reason"] = cuda.reason;
    json["cuda"]["devices"] = Json::array();
    for (const Target& target : targets) {
      if (target.device.type == DeviceType::cuda) {
        json["cuda"]["devices"].push_back(to_json(target.real));
      }
    }
    if (args.kernels) json["kernels"] = kernel_list(targets);
    if (!args.tree.empty()) {
      json["tree"] = {{"path", args.tree},
                      {"fingerprint", tree.at("tree")},
                      {"stale", stale},
                      {"changed", changed}};
    }
    tool::print_json(json);
  } else {
    print_text(args, targets, own);
    if (!args.tree.empty() && !stale) {
      print_out("tree        {} {}\n", args.tree, green("matches this binary"));
    }
  }
  if (!stale) return kOk;
  say(formatted("stale: this binary was built from {}, {} is {} (changed: {}); rebuild it",
                own.at("tree"), args.tree, tree.at("tree"), joined(changed)));
  return kFailed;
}

}  // namespace flashcore::tool
