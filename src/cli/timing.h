// The method of the benchmark, the same for every contender: warm up, then take samples in rounds
// that go through all contenders and back, so that whatever else the machine does meets them alike.
// A sample repeats short runs until it lasts long enough for its clock. Inputs stay the same and
// are not flushed from the caches: those are part of what is measured.
//
// On a GPU a sample is a queue of replays of a CUDA graph, timed by events on the stream, for every
// contender; it lasts long enough for a card that is held to a power limit to show the clock that
// it sustains, not the one it starts with.
#pragma once

#include <string>
#include <vector>

#include "cli/contender.h"

namespace fovea::cli {

struct TimingSettings {
  double min_seconds = 0.3;  // that each contender's samples last together, at least
  int min_rounds = 5;
  int max_rounds = 100;
  double sample_seconds = 2e-3;  // that one sample lasts, at least: far above the clock's own cost
  // Before each sample. Idle threads of the contender before may spin for a while before they
  // sleep; they must not take a core from the next. GNU's OpenMP has them pause 300,000 times,
  // which is 140 cycles each on Intel's CPUs since Skylake: 17 ms at 2.5 GHz.
  double pause_seconds = 40e-3;
};

struct Timing {
  double ms = 0;  // median over the samples
  double ms_p10 = 0;
  double ms_p90 = 0;
  std::string failure;  // of the contender; the times then mean nothing
};

void pause(const TimingSettings& settings);

// One Timing for each contender, in their order.
std::vector<Timing> measure(const std::vector<Contender*>& contenders, BenchPass pass,
                            const TimingSettings& settings);

// Runs that a sample takes so as to last as long as it should.
int repeats_for(double run_seconds, double sample_seconds);

// A GPU's sample of some runs: replays of a graph that holds several calls in a row, so that the
// gap between two launches is a small part of what is timed even where a call takes microseconds.
struct ReplayCounts {
  int calls = 1;                                // in the graph
  int replays = 1;                              // that are timed
  int uncounted = 0;                            // right before those
  int runs() const { return calls * replays; }  // at least as many as asked for
};
ReplayCounts replay_counts(int repeats, Contender::WarmRun warm);

// Linear between the neighbouring samples; fraction 0.5 is the median. `sorted` is not empty.
double quantile(const std::vector<double>& sorted, double fraction);

double geometric_mean(const std::vector<double>& values);

}  // namespace fovea::cli
