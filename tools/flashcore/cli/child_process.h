// A child process that runs this program again, in its own process group. It is spawned, not
// forked: a CUDA context does not survive fork().
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace flashcore::tool {

class ChildProcess {
 public:
  struct Setup {
    std::vector<std::string> arguments;      ///< including argv[0]
    std::vector<std::string> environment;    ///< NAME=value, added to our environment
    std::vector<std::pair<int, int>> files;  ///< our descriptor, and its number in the child
    bool quiet = false;  ///< its output goes to our standard error; its input is empty
  };

  ChildProcess() = default;
  ~ChildProcess() { end(0); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// Returns false if no process can be started.
  bool start(const Setup& setup);
  bool running() const { return pid_ > 0; }
  void send(int signal) const;

  /// Waits for the child to end by itself. Returns true if it has ended.
  bool wait_for(int milliseconds);
  /// Waits as wait_for(), then kills the process group. A process that waits for a device can
  /// survive SIGKILL; it is then abandoned.
  void end(int limit_ms);

  /// "by SIGSEGV (Segmentation fault)", "with exit code 3".
  const std::string& how_it_ended() const { return how_; }
  /// True if end() had to kill it.
  bool was_killed() const { return killed_; }
  /// Exit code, or 128 + the signal number.
  int exit_code() const { return exit_code_; }

 private:
  pid_t pid_ = -1;
  int exit_code_ = 0;
  bool killed_ = false;
  std::string how_;
};

/// For the child: kills this process when its parent ends.
void end_with_parent();

/// Transfers all bytes. Returns false at the end of the pipe or on an error.
bool read_all(int fd, void* data, std::size_t bytes);
bool write_all(int fd, const void* data, std::size_t bytes);

}  // namespace flashcore::tool
