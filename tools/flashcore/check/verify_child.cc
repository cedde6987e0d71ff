// Runs the verified implementation in a child process, with shared memory: a function of a shared
// library, or a FlashCore kernel that might never end.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>

#include "cli/child_process.h"
#include "cli/signals.h"
#include "cli/text.h"
#include "command_error.h"
#include "device_memory.h"
#include "verify_target.h"

namespace flashcore::tool {
namespace {

constexpr int kExitLimitMs = 500;  // for a child that should end by itself
constexpr int kPollMs = 100;       // between two checks of the clock and of signals

/// Open descriptors of the child.
constexpr int kMemoryFd = 3, kRequestFd = 4, kReplyFd = 5;

/// A call in the pipe, with offsets into the shared memory instead of pointers.
struct WireTensor {
  std::int64_t offset = -1;  ///< -1: not given
  flashcore_dtype dtype{};
  std::int32_t rank = 0;
  std::int64_t shape[4] = {}, strides[4] = {};
};
constexpr std::size_t kMostTensors = 13;
struct Request {
  std::uint64_t bytes = 0;  ///< of the shared memory
  WireTensor tensors[kMostTensors];
  std::int64_t window_left = -1, window_right = -1;
  double scale = 1, softcap = 0;
  std::int32_t has_scale = 0, causal = 0, num_splits = 0;
  char kernel[64] = {};  ///< id of our kernel; empty for a library's function
  bool backward = false;
};
struct Reply {
  std::int32_t code = 0;
  bool has_backward = false;  ///< in the first reply of a library's process
  char message[512] = {};
};

constexpr const flashcore_tensor* flashcore_verify_call::*kTensors[] = {
    &flashcore_verify_call::q,       &flashcore_verify_call::k,
    &flashcore_verify_call::v,       &flashcore_verify_call::out,
    &flashcore_verify_call::lse,     &flashcore_verify_call::q_scale,
    &flashcore_verify_call::k_scale, &flashcore_verify_call::v_scale};
constexpr const flashcore_tensor* flashcore_verify_backward_call::*kGradientTensors[] = {
    &flashcore_verify_backward_call::dout, &flashcore_verify_backward_call::dlse,
    &flashcore_verify_backward_call::dq, &flashcore_verify_backward_call::dk,
    &flashcore_verify_backward_call::dv};
static_assert(std::size(kTensors) + std::size(kGradientTensors) == kMostTensors);

class ChildTarget final : public KernelTarget {
 public:
  /// `name` is for messages; `arguments` follow "flashcore verify --serve".
  ChildTarget(std::string name, const std::vector<std::string>& arguments, double limit_s)
      : name_(std::move(name)), arguments_{"flashcore", "verify", "--serve"}, limit_s_(limit_s) {
    arguments_.insert(arguments_.end(), arguments.begin(), arguments.end());
    memory_fd_ = memfd_create("flashcore-verify", 0);
    if (memory_fd_ < 0) throw CommandError(name_ + ": cannot create shared memory");
    std::signal(SIGPIPE, SIG_IGN);  // write() reports a dead child
  }
  ~ChildTarget() override {
    stop();
    unmap();
    close(memory_fd_);
  }

  void choose(const KernelInfo& kernel) override {
    kernel_ = kernel.id;
    kernel_is_backward_ = kernel.op == Operation::bwd;
  }

  std::byte* block(std::size_t bytes) override {
    if (bytes > capacity_) {
      unmap();
      if (ftruncate(memory_fd_, static_cast<off_t>(bytes)) != 0) throw std::bad_alloc();
      void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd_, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      base_ = static_cast<std::byte*>(mapped);
      capacity_ = bytes;
    }
    return base_;
  }

  std::int32_t call(const flashcore_verify_call& c, std::string* message) override {
    Request request = request_of(c);
    if (kernel_is_backward_) request.kernel[0] = '\0';  // the planner chooses the forward kernel
    return send(request, message);
  }

  bool has_backward() const override { return kernel_is_backward_ || library_has_backward_; }

  std::int32_t call_backward(const flashcore_verify_backward_call& c,
                             std::string* message) override {
    Request request = request_of(*c.forward);
    request.backward = true;
    for (std::size_t i = 0; i < std::size(kGradientTensors); ++i) {
      put(c.*kGradientTensors[i], request.tensors[std::size(kTensors) + i]);
    }
    return send(request, message);
  }

  bool died() const override { return died_; }

 private:
  void put(const flashcore_tensor* t, WireTensor& w) const {
    if (t == nullptr) return;
    w.offset = static_cast<std::byte*>(t->data) - base_;
    w.dtype = t->dtype;
    w.rank = t->ndim;
    std::copy(t->shape, t->shape + t->ndim, w.shape);
    std::copy(t->strides, t->strides + t->ndim, w.strides);
  }

  Request request_of(const flashcore_verify_call& c) const {
    Request request;
    std::copy_n(kernel_.data(), std::min(kernel_.size(), sizeof request.kernel - 1),
                request.kernel);
    request.bytes = capacity_;
    for (std::size_t i = 0; i < std::size(kTensors); ++i) put(c.*kTensors[i], request.tensors[i]);
    request.window_left = c.window_left, request.window_right = c.window_right;
    request.scale = c.scale, request.softcap = c.softcap;
    request.has_scale = c.has_scale, request.causal = c.causal, request.num_splits = c.num_splits;
    return request;
  }

  std::int32_t send(const Request& request, std::string* message) {
    died_ = false;
    if (noted_signal() != 0) return interrupted(message);
    if (!child_.running()) start();
    Reply reply;
    if (!write_all(to_child_, &request, sizeof request)) return lost(message);
    if (!has_reply()) {
      if (noted_signal() != 0) return interrupted(message);
      child_.end(0);
      close_pipes();
      died_ = true;
      *message = formatted("it did not return within {} s; its process was killed", limit_s_);
      return FLASHCORE_INTERNAL;
    }
    if (!read_all(from_child_, &reply, sizeof reply)) return lost(message);
    reply.message[sizeof reply.message - 1] = '\0';
    *message = reply.message;
    return reply.code;
  }

  void start() {
    int request[2], reply[2];
    if (pipe2(request, O_CLOEXEC) != 0 || pipe2(reply, O_CLOEXEC) != 0) {
      throw CommandError(name_ + ": cannot create a pipe");
    }
    const bool started = child_.start(
        {.arguments = arguments_,
         .environment = {},
         .files = {{memory_fd_, kMemoryFd}, {request[0], kRequestFd}, {reply[1], kReplyFd}},
         .quiet = true});  // its output must not get into a report
    close(request[0]);
    close(reply[1]);
    to_child_ = request[1];
    from_child_ = reply[0];
    if (!started) throw CommandError(name_ + ": cannot start its process");
    Reply hello;
    if (!has_reply()) {
      stop();
      throw CommandError(formatted("{}: loading it did not end within {} s", name_, limit_s_));
    }
    if (read_all(from_child_, &hello, sizeof hello) && hello.code == FLASHCORE_OK) {
      library_has_backward_ = hello.has_backward;
      return;
    }
    hello.message[sizeof hello.message - 1] = '\0';
    const std::string how = stop();
    throw CommandError(*hello.message != '\0'
                           ? std::string(hello.message)
                           : formatted("{}: its process ended {} while loading", name_, how));
  }

  /// Waits for a reply or the end of the child. Returns false after the limit or a signal.
  bool has_reply() const {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      pollfd waiting{from_child_, POLLIN, 0};
      if (poll(&waiting, 1, kPollMs) > 0) return true;
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
      if (noted_signal() != 0 || (limit_s_ > 0 && waited.count() > limit_s_)) return false;
    }
  }

  /// Reports how the child ended.
  std::int32_t lost(std::string* message) {
    died_ = true;
    *message = formatted("the call ended its process {}", stop());
    return FLASHCORE_INTERNAL;
  }

  /// Fails this and all later calls, so that the caller ends soon.
  std::int32_t interrupted(std::string* message) {
    child_.end(0);
    close_pipes();
    died_ = true;
    *message = "interrupted";
    return FLASHCORE_INTERNAL;
  }

  /// Ends the child, and kills it if it does not exit. Returns how it ended: "by SIGSEGV (...)".
  std::string stop() {
    close_pipes();  // a child that waits for a request then exits
    if (!child_.running()) return "";
    child_.end(kExitLimitMs);
    return child_.how_it_ended();
  }

  void close_pipes() {
    for (int* fd : {&to_child_, &from_child_}) {
      if (*fd >= 0) close(*fd);
      *fd = -1;
    }
  }

  void unmap() {
    if (base_ != nullptr) munmap(base_, capacity_);
    base_ = nullptr;
    capacity_ = 0;
  }

  std::string name_;
  std::vector<std::string> arguments_;
  double limit_s_;
  std::string kernel_;
  bool kernel_is_backward_ = false, library_has_backward_ = false;
  ChildProcess child_;
  int memory_fd_ = -1, to_child_ = -1, from_child_ = -1;
  std::byte* base_ = nullptr;
  std::size_t capacity_ = 0;
  bool died_ = false;
};

/// The child. Maps the memory and makes the calls. On a GPU it copies the memory of a library's
/// call to the device and back; run_call() does so for our kernels.
class Server {
 public:
  /// A null function selects our kernels.
  Server(flashcore_verify_function function, flashcore_verify_backward_function backward,
         const DeviceArgs& device)
      : function_(function), backward_(backward) {
    if (function == nullptr || device.device != "cpu") target_ = find_target(device);
  }

  Reply serve(const Request& r) {
    Reply reply;
    map(r.bytes);
    const bool on_gpu = function_ != nullptr && target_.device.type == DeviceType::cuda;
    std::unique_ptr<DeviceMemory> block;
    std::byte* base = base_;
    if (on_gpu) {
      block = std::make_unique<DeviceMemory>(*target_.backend, target_.device, mapped_);
      base = block->data();
      require(target_.backend->upload(base, base_, mapped_, target_.device.index));
    }
    flashcore_tensor tensors[kMostTensors] = {};
    flashcore_verify_call c{};
    c.struct_size = sizeof c;
    flashcore_verify_backward_call gradients{};
    gradients.struct_size = sizeof gradients;
    gradients.forward = &c;
    WireTensor wire[kMostTensors];
    std::copy(std::begin(r.tensors), std::end(r.tensors), wire);
    for (std::size_t i = 0; i < kMostTensors; ++i) {
      if (wire[i].offset < 0) continue;
      tensors[i] = {base + wire[i].offset,
                    {on_gpu ? FLASHCORE_CUDA : FLASHCORE_CPU, target_.device.index},
                    wire[i].rank,
                    wire[i].dtype,
                    wire[i].shape,
                    wire[i].strides,
                    0};
      if (i < std::size(kTensors)) {
        c.*kTensors[i] = &tensors[i];
      } else {
        gradients.*kGradientTensors[i - std::size(kTensors)] = &tensors[i];
      }
    }
    c.window_left = r.window_left, c.window_right = r.window_right;
    c.scale = r.scale, c.softcap = r.softcap;
    c.has_scale = r.has_scale, c.causal = r.causal, c.num_splits = r.num_splits;
    c.message = reply.message;
    c.message_bytes = sizeof reply.message;
    try {
      if (function_ == nullptr) {
        reply.code = run_kernel(r, gradients, reply);
      } else {
        reply.code = r.backward ? backward_(&gradients, nullptr) : function_(&c, nullptr);
      }
    } catch (const std::exception& error) {
      reply.code = FLASHCORE_INTERNAL;
      std::snprintf(reply.message, sizeof reply.message, "it threw: %s", error.what());
    } catch (...) {
      reply.code = FLASHCORE_INTERNAL;
      std::snprintf(reply.message, sizeof reply.message, "it threw an unknown exception");
    }
    if (on_gpu) {
      require(target_.backend->download(base_, base, mapped_, target_.device.index));
    }
    return reply;
  }

 private:
  static void require(const Status& status) {
    if (!status.ok()) throw CommandError(status);
  }

  std::int32_t run_kernel(const Request& r, const flashcore_verify_backward_call& c, Reply& reply) {
    const char* kernel = r.kernel[0] == '\0' ? nullptr : r.kernel;
    const Status status = r.backward ? run_backward_call(target_, kernel, c, base_, mapped_)
                                     : run_call(target_, kernel, *c.forward, base_, mapped_);
    std::snprintf(reply.message, sizeof reply.message, "%s", status.message().c_str());
    return static_cast<std::int32_t>(status.code());
  }

  void map(std::size_t bytes) {
    if (bytes == mapped_) return;
    if (base_ != nullptr) munmap(base_, mapped_);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, kMemoryFd, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(memory);
    mapped_ = bytes;
  }

  flashcore_verify_function function_;
  flashcore_verify_backward_function backward_;
  Target target_;
  std::byte* base_ = nullptr;
  std::size_t mapped_ = 0;
};

}  // namespace

std::unique_ptr<verify::CallTarget> library_target(const std::string& library,
                                                   const std::string& symbol,
                                                   const std::string& device, double limit_s) {
  return std::make_unique<ChildTarget>(
      "--lib", std::vector<std::string>{"--lib", library, "--symbol", symbol, "--device", device},
      limit_s);
}

std::unique_ptr<KernelTarget> kernel_child(const DeviceArgs& device, double limit_s) {
  std::vector<std::string> arguments{"--device", device.device};
  if (!device.plan_for.empty()) arguments.insert(arguments.end(), {"--plan-for", device.plan_for});
  if (device.threads > 0) {
    arguments.insert(arguments.end(), {"--threads", std::to_string(device.threads)});
  }
  return std::make_unique<ChildTarget>("the kernels' process", arguments, limit_s);
}

int serve_verify(const std::string& library, const std::string& symbol, const DeviceArgs& device) {
  end_with_parent();
  Reply hello;
  const auto refuse = [&](const std::string& why) {
    hello.code = FLASHCORE_INVALID_ARGUMENT;
    std::snprintf(hello.message, sizeof hello.message, "%s", why.c_str());
    write_all(kReplyFd, &hello, sizeof hello);
    return kCouldNotRun;
  };
  void *address = nullptr, *backward = nullptr;
  if (!library.empty()) {
    // dlopen() looks for a name without a slash among the system's libraries.
    const std::string path = library.find('/') == std::string::npos ? "./" + library : library;
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return refuse(formatted("--lib: {}", dlerror()));
    address = dlsym(handle, symbol.c_str());
    if (address == nullptr) {
      return refuse(formatted("--symbol: {} has no function {}", library, symbol));
    }
    backward = dlsym(handle, (symbol + "_backward").c_str());
  }
  try {
    Server server(reinterpret_cast<flashcore_verify_function>(address),
                  reinterpret_cast<flashcore_verify_backward_function>(backward), device);
    hello.has_backward = backward != nullptr;
    write_all(kReplyFd, &hello, sizeof hello);
    Request request;
    while (read_all(kRequestFd, &request, sizeof request)) {
      const Reply reply = server.serve(request);
      if (!write_all(kReplyFd, &reply, sizeof reply)) break;
    }
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
  return kOk;
}

}  // namespace flashcore::tool
