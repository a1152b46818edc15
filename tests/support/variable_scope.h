// A variable of the environment, for a while.
#pragma once

#include <cstdlib>
#include <string>

namespace fovea::test {

// Sets a variable of the environment for as long as it lives, if there is something to set it to.
class VariableScope {
 public:
  VariableScope(const char* name, const std::string& value) : name_(name) {
    const char* before = std::getenv(name_);
    had_ = before != nullptr;
    if (had_) before_ = before;
    if (!value.empty()) setenv(name_, value.c_str(), 1);
  }
  ~VariableScope() {
    if (had_) {
      setenv(name_, before_.c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  VariableScope(const VariableScope&) = delete;
  VariableScope& operator=(const VariableScope&) = delete;

 private:
  const char* name_;
  bool had_ = false;
  std::string before_;
};

}  // namespace fovea::test
