// Runs the program through the shell and keeps what it says.
#include "program.h"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace fovea::test {

Ran fovea(const std::string& arguments, const std::string& environment) {
  const ScratchFolder folder;
  const std::string errors = folder.path("errors");
  const std::string command =
      environment + " '" FOVEA_PROGRAM "' " + arguments + " 2>'" + errors + "' </dev/null";
  Ran ran;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return ran;
  char buffer[4096];
  for (size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    ran.out.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) ran.code = WEXITSTATUS(status);
  ran.errors = read_file(errors);
  return ran;
}

ScratchFolder::ScratchFolder() {
  folder_ = (std::filesystem::temp_directory_path() / "fovea-test-XXXXXX").string();
  if (::mkdtemp(folder_.data()) == nullptr) folder_.clear();
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

std::string ScratchFolder::write(const std::string& name, const std::string& text) const {
  std::ofstream(path(name)) << text;
  return path(name);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace fovea::test
