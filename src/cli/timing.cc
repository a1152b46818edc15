// Interleaved sampling.
#include "cli/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace fovea::cli {
namespace {

constexpr double kSampleSeconds = 2e-3;     // shortest sample: far above the clock's own cost
constexpr double kWarmBelowSeconds = 0.05;  // a run this long warms its caches as it goes

// Idle threads of the contender before may spin for a few milliseconds before they sleep (OpenMP's
// do); they must not take a core from the next.
constexpr auto kPause = std::chrono::milliseconds(5);

struct Track {
  Contender* contender = nullptr;
  double run_seconds = 0;  // estimate from the warm-up
  int repeats = 1;
  double total = 0;
  std::vector<double> samples;  // seconds per run
  std::string failure;
};

void warm_up(Track& track, Pass pass) {
  std::this_thread::sleep_for(kPause);
  for (int i = 0; i < 2; ++i) {
    const Result<double> seconds = track.contender->sample(pass, 1, Contender::WarmRun::kNone);
    if (!seconds.ok()) {
      track.failure = seconds.status().message();
      return;
    }
    track.run_seconds = *seconds;
    if (*seconds > 1) break;  // long enough to be past its first-run costs
  }
  track.repeats = static_cast<int>(
      std::clamp(std::ceil(kSampleSeconds / std::max(track.run_seconds, 1e-9)), 1.0, 1e6));
}

void take_sample(Track& track, Pass pass) {
  std::this_thread::sleep_for(kPause);
  const auto warm = track.run_seconds < kWarmBelowSeconds ? Contender::WarmRun::kUncounted
                                                          : Contender::WarmRun::kNone;
  const Result<double> seconds = track.contender->sample(pass, track.repeats, warm);
  if (!seconds.ok()) {
    track.failure = seconds.status().message();
    return;
  }
  track.total += *seconds;
  track.samples.push_back(*seconds / track.repeats);
}

Timing summary(Track& track) {
  Timing timing;
  timing.failure = track.failure;
  if (!timing.failure.empty()) return timing;
  std::sort(track.samples.begin(), track.samples.end());
  timing.ms = 1e3 * quantile(track.samples, 0.5);
  timing.ms_p10 = 1e3 * quantile(track.samples, 0.1);
  timing.ms_p90 = 1e3 * quantile(track.samples, 0.9);
  return timing;
}

}  // namespace

std::vector<Timing> measure(const std::vector<Contender*>& contenders, Pass pass,
                            const TimingSettings& settings) {
  std::vector<Track> tracks;
  for (Contender* contender : contenders) {
    tracks.emplace_back().contender = contender;
    warm_up(tracks.back(), pass);
  }
  for (int round = 0; round < settings.max_rounds; ++round) {
    bool enough = round >= settings.min_rounds;
    for (const Track& track : tracks) {
      enough = enough && (track.total >= settings.min_seconds || !track.failure.empty());
    }
    if (enough) break;
    for (size_t i = 0; i < tracks.size(); ++i) {
      Track& track = tracks[round % 2 == 0 ? i : tracks.size() - 1 - i];
      if (track.failure.empty()) take_sample(track, pass);
    }
  }
  std::vector<Timing> timings;
  for (Track& track : tracks) timings.push_back(summary(track));
  return timings;
}

double quantile(const std::vector<double>& sorted, double fraction) {
  const double at = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

double geometric_mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += std::log(v);
  return values.empty() ? 0 : std::exp(sum / static_cast<double>(values.size()));
}

}  // namespace fovea::cli
