// The method of the benchmark, the same for every contender: warm up, then take samples in rounds
// that go through all contenders and back, so that whatever else the machine does meets them alike.
// A sample repeats short runs until it lasts a few milliseconds. Inputs stay the same and are not
// flushed from the caches: on a CPU the caches are part of what is measured.
#pragma once

#include <string>
#include <vector>

#include "cli/contender.h"

namespace fovea::cli {

struct TimingSettings {
  double min_seconds = 0.3;  // that each contender's samples last together, at least
  int min_rounds = 5;
  int max_rounds = 100;
};

struct Timing {
  double ms = 0;  // median over the samples
  double ms_p10 = 0;
  double ms_p90 = 0;
  std::string failure;  // of the contender; the times then mean nothing
};

// One Timing for each contender, in their order.
std::vector<Timing> measure(const std::vector<Contender*>& contenders, Pass pass,
                            const TimingSettings& settings);

// Linear between the neighbouring samples; fraction 0.5 is the median. `sorted` is not empty.
double quantile(const std::vector<double>& sorted, double fraction);

double geometric_mean(const std::vector<double>& values);

}  // namespace fovea::cli
