// How far a long run is: a bar with the time left on a terminal, a line per step elsewhere. Written
// to standard error, so that standard output holds results alone.
#pragma once

#include <chrono>
#include <string>

namespace fovea::cli {

class Progress {
 public:
  // `total` is the work of all steps in any unit, the same as `done` of step().
  explicit Progress(double total);
  ~Progress();

  void begin_step(const std::string& what);
  void end_step(double work, const std::string& outcome);
  void note(const std::string& line);  // something to be read whatever the bar does

 private:
  void draw();
  void clear();

  bool terminal_;
  double total_;
  double done_ = 0;
  bool drawn_ = false;
  std::string what_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace fovea::cli
