// A child process that is this program again, in a process group of its own. (exec, not fork alone:
// a CUDA context does not survive a fork.)
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace flashcore::tool {

class ChildProcess {
 public:
  struct Setup {
    std::vector<std::string> arguments;      ///< with the program's name
    std::vector<std::string> environment;    ///< NAME=value, besides this process's own
    std::vector<std::pair<int, int>> files;  ///< ours, and the number the child finds it at
    bool quiet = false;  ///< its standard output is our standard error, its input is empty
  };

  ChildProcess() = default;
  ~ChildProcess() { end(0); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// False where no process can be started.
  bool start(const Setup& setup);
  bool running() const { return pid_ > 0; }
  void send(int signal) const;

  /// Waits so long for the child to end by itself; whether it has.
  bool wait_for(int milliseconds);
  /// The same, then ends the whole group by force. A process that waits for a device may outlive
  /// even that; it is then left to the system.
  void end(int patience_ms);

  /// "by SIGSEGV (Segmentation fault)", "with exit code 3"; "without leaving it" after force.
  const std::string& how_it_ended() const { return how_; }
  /// Its exit code, or 128 + the signal's number.
  int exit_code() const { return exit_code_; }

 private:
  pid_t pid_ = -1;
  int exit_code_ = 0;
  std::string how_;
};

/// In the child: ends this process when its parent ends.
void end_with_parent();

/// All of it, or false at the end of the pipe.
bool read_all(int fd, void* data, std::size_t bytes);
bool write_all(int fd, const void* data, std::size_t bytes);

}  // namespace flashcore::tool
