// Runs the program fovea as a user would.
#pragma once

#include <string>

namespace fovea::test {

struct Ran {
  int code = -1;
  std::string out;     // standard output
  std::string errors;  // standard error
};

// `arguments` is shell text; `environment` holds assignments that go before the command.
Ran fovea(const std::string& arguments, const std::string& environment = "");

// A folder of its own for one test, gone afterwards.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const;  // its path

 private:
  std::string folder_;
};

std::string read_file(const std::string& path);

}  // namespace fovea::test
