// A function of a shared library as the verifier's subject: called in a child process, on memory
// both processes share. The child is this program again (exec, not fork: a CUDA context does not
// survive a fork).
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "command_error.h"
#include "device_memory.h"
#include "text.h"
#include "verify_target.h"

extern char** environ;

namespace flashcore::tool {
namespace {

/// For a child that should end by itself.
constexpr int kPatienceMs = 500;

/// The child finds these open.
constexpr int kMemoryFd = 3, kRequestFd = 4, kReplyFd = 5;

/// A call as it goes through the pipe: offsets into the shared memory instead of pointers.
struct WireTensor {
  std::int64_t offset = -1;  ///< -1: not given
  flashcore_dtype dtype{};
  std::int32_t rank = 0;
  std::int64_t shape[4] = {}, strides[4] = {};
};
struct Request {
  std::uint64_t bytes = 0;  ///< of the shared memory
  WireTensor tensors[8];
  std::int64_t window_left = -1, window_right = -1;
  double scale = 1, softcap = 0;
  std::int32_t has_scale = 0, causal = 0, num_splits = 0;
};
struct Reply {
  std::int32_t code = 0;
  char message[512] = {};
};

constexpr const flashcore_tensor* flashcore_verify_call::*kTensors[] = {
    &flashcore_verify_call::q,       &flashcore_verify_call::k,
    &flashcore_verify_call::v,       &flashcore_verify_call::out,
    &flashcore_verify_call::lse,     &flashcore_verify_call::q_scale,
    &flashcore_verify_call::k_scale, &flashcore_verify_call::v_scale};

/// All of it, or false at the end of the pipe.
bool read_all(int fd, void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = read(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

bool write_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

/// "SIGSEGV (Segmentation fault)"
std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return formatted("SIG{} ({})", name != nullptr ? name : "?", strsignal(number));
}

class LibraryTarget final : public verify::CallTarget {
 public:
  LibraryTarget(std::string library, std::string symbol, std::string device, double limit_s)
      : arguments_{"flashcore", "verify",          "--serve",  "--lib",          std::move(library),
                   "--symbol",  std::move(symbol), "--device", std::move(device)},
        limit_s_(limit_s) {
    memory_fd_ = memfd_create("flashcore-verify", 0);
    if (memory_fd_ < 0) throw CommandError("--lib: no shared memory can be made here");
    std::signal(SIGPIPE, SIG_IGN);  // a dead child shows in the answer, not by a signal to us
  }
  ~LibraryTarget() override {
    stop();
    unmap();
    close(memory_fd_);
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
    died_ = false;
    if (pid_ < 0) start();
    Request request;
    request.bytes = capacity_;
    for (std::size_t i = 0; i < std::size(kTensors); ++i) {
      const flashcore_tensor* t = c.*kTensors[i];
      if (t == nullptr) continue;
      WireTensor& w = request.tensors[i];
      w.offset = static_cast<std::byte*>(t->data) - base_;
      w.dtype = t->dtype;
      w.rank = t->ndim;
      std::copy(t->shape, t->shape + t->ndim, w.shape);
      std::copy(t->strides, t->strides + t->ndim, w.strides);
    }
    request.window_left = c.window_left, request.window_right = c.window_right;
    request.scale = c.scale, request.softcap = c.softcap;
    request.has_scale = c.has_scale, request.causal = c.causal, request.num_splits = c.num_splits;
    Reply reply;
    if (!write_all(to_child_, &request, sizeof request)) return lost(message);
    if (!is_answered()) {
      stop();
      died_ = true;
      *message = formatted("it did not return within {} s; its process was ended", limit_s_);
      return FLASHCORE_INTERNAL;
    }
    if (!read_all(from_child_, &reply, sizeof reply)) return lost(message);
    reply.message[sizeof reply.message - 1] = '\0';
    *message = reply.message;
    return reply.code;
  }

  bool died() const override { return died_; }

 private:
  void start() {
    int request[2], reply[2];
    if (pipe2(request, O_CLOEXEC) != 0 || pipe2(reply, O_CLOEXEC) != 0) {
      throw CommandError("--lib: no pipe can be made here");
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    // Above the numbers the child finds them at, so that none is overwritten before it is moved.
    const int from[3] = {fcntl(memory_fd_, F_DUPFD_CLOEXEC, 20),
                         fcntl(request[0], F_DUPFD_CLOEXEC, 20),
                         fcntl(reply[1], F_DUPFD_CLOEXEC, 20)};
    const int to[3] = {kMemoryFd, kRequestFd, kReplyFd};
    for (int i = 0; i < 3; ++i) posix_spawn_file_actions_adddup2(&actions, from[i], to[i]);
    // What the library prints must not get into a report, and it has nobody to ask.
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    std::vector<char*> arguments;
    for (std::string& a : arguments_) arguments.push_back(a.data());
    arguments.push_back(nullptr);
    const int code =
        posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    for (const int fd : {from[0], from[1], from[2], request[0], reply[1]}) close(fd);
    to_child_ = request[1];
    from_child_ = reply[0];
    if (code != 0) {
      pid_ = -1;
      throw CommandError("--lib: its process cannot be started");
    }
    Reply hello;
    if (!is_answered()) {
      stop();
      throw CommandError(formatted("--lib: loading it did not end within {} s", limit_s_));
    }
    if (read_all(from_child_, &hello, sizeof hello) && hello.code == FLASHCORE_OK) return;
    hello.message[sizeof hello.message - 1] = '\0';
    const std::string how = stop();
    throw CommandError(*hello.message != '\0' ? std::string(hello.message)
                                              : formatted("--lib: loading it ended {}", how));
  }

  /// Waits for a reply, or the end of the child.
  bool is_answered() const {
    pollfd waiting{from_child_, POLLIN, 0};
    int ready = 0;
    do {
      ready = poll(&waiting, 1, static_cast<int>(limit_s_ * 1000));
    } while (ready < 0 && errno == EINTR);
    return ready != 0;
  }

  /// The child is gone: why?
  std::int32_t lost(std::string* message) {
    died_ = true;
    *message = formatted("the call ended its process {}", stop());
    return FLASHCORE_INTERNAL;
  }

  /// Ends the child, by force where it does not end by itself: "by SIGSEGV (...)".
  std::string stop() {
    close_pipes();  // which ends a child that still listens
    if (pid_ < 0) return "";
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < kPatienceMs && ended == 0; ++i) {
      ended = waitpid(pid_, &status, WNOHANG);
      if (ended == 0) usleep(1000);
    }
    if (ended == 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, &status, 0);
    }
    pid_ = -1;
    if (ended == 0) return "without leaving it";
    return WIFSIGNALED(status) ? formatted("by {}", signal_name(WTERMSIG(status)))
                               : formatted("with exit code {}", WEXITSTATUS(status));
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

  std::vector<std::string> arguments_;
  double limit_s_;
  int memory_fd_ = -1, to_child_ = -1, from_child_ = -1;
  pid_t pid_ = -1;
  std::byte* base_ = nullptr;
  std::size_t capacity_ = 0;
  bool died_ = false;
};

/// The child: maps the memory, calls, and on a GPU copies the block there and back.
class Server {
 public:
  Server(flashcore_verify_function function, const std::string& device) : function_(function) {
    if (device != "cpu") target_ = find_target({device, "", 0});
  }

  Reply answer(const Request& r) {
    Reply reply;
    map(r.bytes);
    const bool on_gpu = target_.device.type == DeviceType::cuda;
    std::unique_ptr<DeviceMemory> block;
    std::byte* base = base_;
    if (on_gpu) {
      block = std::make_unique<DeviceMemory>(*target_.backend, target_.device, mapped_);
      base = block->data();
      require(target_.backend->upload(base, base_, mapped_, target_.device.index));
    }
    flashcore_tensor tensors[8] = {};
    flashcore_verify_call c{};
    c.struct_size = sizeof c;
    WireTensor wire[8];
    std::copy(std::begin(r.tensors), std::end(r.tensors), wire);
    for (std::size_t i = 0; i < std::size(kTensors); ++i) {
      if (wire[i].offset < 0) continue;
      tensors[i] = {base + wire[i].offset,
                    {on_gpu ? FLASHCORE_CUDA : FLASHCORE_CPU, target_.device.index},
                    wire[i].rank,
                    wire[i].dtype,
                    wire[i].shape,
                    wire[i].strides,
                    0};
      c.*kTensors[i] = &tensors[i];
    }
    c.window_left = r.window_left, c.window_right = r.window_right;
    c.scale = r.scale, c.softcap = r.softcap;
    c.has_scale = r.has_scale, c.causal = r.causal, c.num_splits = r.num_splits;
    c.message = reply.message;
    c.message_bytes = sizeof reply.message;
    try {
      reply.code = function_(&c, nullptr);
    } catch (const std::exception& error) {
      reply.code = FLASHCORE_INTERNAL;
      std::snprintf(reply.message, sizeof reply.message, "it threw: %s", error.what());
    } catch (...) {
      reply.code = FLASHCORE_INTERNAL;
      std::snprintf(reply.message, sizeof reply.message, "it threw something");
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

  void map(std::size_t bytes) {
    if (bytes == mapped_) return;
    if (base_ != nullptr) munmap(base_, mapped_);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, kMemoryFd, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(memory);
    mapped_ = bytes;
  }

  flashcore_verify_function function_;
  Target target_;
  std::byte* base_ = nullptr;
  std::size_t mapped_ = 0;
};

}  // namespace

std::unique_ptr<verify::CallTarget> library_target(const std::string& library,
                                                   const std::string& symbol,
                                                   const std::string& device, double limit_s) {
  return std::make_unique<LibraryTarget>(library, symbol, device, limit_s);
}

int serve_library(const std::string& library, const std::string& symbol,
                  const std::string& device) {
  Reply hello;
  const auto refuse = [&](const std::string& why) {
    hello.code = FLASHCORE_INVALID_ARGUMENT;
    std::snprintf(hello.message, sizeof hello.message, "%s", why.c_str());
    write_all(kReplyFd, &hello, sizeof hello);
    return kCouldNotRun;
  };
  // A name without a slash would be looked for among the system's libraries.
  const std::string path = library.find('/') == std::string::npos ? "./" + library : library;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return refuse(formatted("--lib: {}", dlerror()));
  void* address = dlsym(handle, symbol.c_str());
  if (address == nullptr) {
    return refuse(formatted("--symbol: {} has no function {}", library, symbol));
  }
  try {
    Server server(reinterpret_cast<flashcore_verify_function>(address), device);
    write_all(kReplyFd, &hello, sizeof hello);
    Request request;
    while (read_all(kRequestFd, &request, sizeof request)) {
      const Reply reply = server.answer(request);
      if (!write_all(kReplyFd, &reply, sizeof reply)) break;
    }
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
  return kOk;
}

}  // namespace flashcore::tool
