// Child processes: one that is talked to line by line, and one whose output is wanted whole.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "fovea/status.h"

namespace fovea::cli {

// A child whose standard input and output are one socket, so that a child that has died gives an
// error to write to and not a signal. Its standard error goes to a file. It is ended, and waited
// for, by the destructor.
class ChildProcess {
 public:
  // argv[0] is looked up in PATH. `environment` holds NAME=value entries added to this process's.
  static Result<ChildProcess> start(const std::vector<std::string>& argv,
                                    const std::vector<std::string>& environment,
                                    const std::string& stderr_path);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  Status write_line(const std::string& line);
  Result<std::string> read_line(int timeout_seconds);

 private:
  ChildProcess(pid_t pid, int socket) : pid_(pid), socket_(socket) {}
  void end();

  pid_t pid_ = -1;
  int socket_ = -1;
  std::string pending_;  // read, but not yet asked for
};

// Standard output of a command, without its last newline; empty when it could not be run or failed.
std::string output_of(const std::vector<std::string>& argv);

}  // namespace fovea::cli
