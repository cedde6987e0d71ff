#include "cli/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cli/text.h"

extern char** environ;

namespace flashcore::tool {
namespace {

/// Descriptors are first duplicated above the child's numbers, so that no dup2() overwrites one
/// that is still needed.
constexpr int kFirstCopy = 20;
constexpr int kKillLimitMs = 10000;

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return formatted("SIG{} ({})", name != nullptr ? name : "?", strsignal(number));
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> list;
  for (std::string& word : words) list.push_back(word.data());
  return list;
}

}  // namespace

bool ChildProcess::start(const Setup& setup) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  std::vector<int> copies;
  for (const auto& [ours, theirs] : setup.files) {
    copies.push_back(fcntl(ours, F_DUPFD_CLOEXEC, kFirstCopy));
    posix_spawn_file_actions_adddup2(&actions, copies.back(), theirs);
  }
  if (setup.quiet) {
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);

  std::vector<std::string> words = setup.arguments, added = setup.environment;
  std::vector<char*> arguments = pointers(words), variables = pointers(added);
  arguments.push_back(nullptr);
  for (char** one = environ; *one != nullptr; ++one) variables.push_back(*one);
  variables.push_back(nullptr);
  const int code = posix_spawn(&pid_, "/proc/self/exe", &actions, &attributes, arguments.data(),
                               variables.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  for (const int copy : copies) close(copy);
  how_.clear();
  killed_ = false;
  if (code != 0) pid_ = -1;
  return code == 0;
}

void ChildProcess::send(int signal) const {
  if (running()) kill(pid_, signal);
}

bool ChildProcess::wait_for(int milliseconds) {
  for (int waited = 0; running(); ++waited) {
    int status = 0;
    const pid_t ended = waitpid(pid_, &status, WNOHANG);
    if (ended == pid_) {
      pid_ = -1;
      const bool by_signal = WIFSIGNALED(status);
      exit_code_ = by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      how_ = by_signal ? "by " + signal_name(WTERMSIG(status))
                       : formatted("with exit code {}", exit_code_);
      return true;
    }
    if (waited >= milliseconds) return false;
    usleep(1000);
  }
  return true;
}

void ChildProcess::end(int limit_ms) {
  if (wait_for(limit_ms)) return;
  kill(-pid_, SIGKILL);
  wait_for(kKillLimitMs);
  pid_ = -1;
  killed_ = true;
  how_ = "by SIGKILL, because it did not exit";
}

void end_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

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

}  // namespace flashcore::tool
