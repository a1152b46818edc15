// Interleaved sampling.
#include "cli/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace fovea::cli {
namespace {

// A run this long warms its caches as it goes, and what the pause before it costs is hardly seen.
// In shorter ones it is: with a bound between two contenders only one of them would pay for it.
constexpr double kWarmBelowSeconds = 0.5;
constexpr int kMostCalls = 20;      // in one graph: launching it costs far less than running
constexpr int kFewestReplays = 10;  // of one graph, where a sample has that many runs
constexpr int kUncountedShare = 4;  // a replay before the clock starts for so many after

struct Track {
  Contender* contender = nullptr;
  double run_seconds = 0;  // estimate from the warm-up
  int repeats = 1;
  double total = 0;
  std::vector<double> samples;  // seconds per run
  std::string failure;
};

// Two single runs, then as many as those say a sample takes: alone, a short run takes longer.
void warm_up(Track& track, BenchPass pass, const TimingSettings& settings) {
  pause(settings);
  for (int i = 0; i < 3; ++i) {
    if (i == 2) track.repeats = repeats_for(track.run_seconds, settings.sample_seconds);
    if (i == 2 && track.repeats == 1) return;
    const Result<double> seconds =
        track.contender->sample(pass, track.repeats, Contender::WarmRun::kNone);
    if (!seconds.ok()) {
      track.failure = seconds.status().message();
      return;
    }
    track.run_seconds = *seconds / track.repeats;
    if (*seconds > 1) break;  // long enough to be past its first-run costs
  }
  track.repeats = repeats_for(track.run_seconds, settings.sample_seconds);
}

void take_sample(Track& track, BenchPass pass, const TimingSettings& settings) {
  pause(settings);
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

void pause(const TimingSettings& settings) {
  std::this_thread::sleep_for(std::chrono::duration<double>(settings.pause_seconds));
}

std::vector<Timing> measure(const std::vector<Contender*>& contenders, BenchPass pass,
                            const TimingSettings& settings) {
  std::vector<Track> tracks;
  for (Contender* contender : contenders) {
    tracks.emplace_back().contender = contender;
    warm_up(tracks.back(), pass, settings);
  }
  for (int round = 0; round < settings.max_rounds; ++round) {
    bool enough = round >= settings.min_rounds;
    for (const Track& track : tracks) {
      enough = enough && (track.total >= settings.min_seconds || !track.failure.empty());
    }
    if (enough) break;
    for (size_t i = 0; i < tracks.size(); ++i) {
      Track& track = tracks[round % 2 == 0 ? i : tracks.size() - 1 - i];
      if (track.failure.empty()) take_sample(track, pass, settings);
    }
  }
  std::vector<Timing> timings;
  for (Track& track : tracks) timings.push_back(summary(track));
  return timings;
}

int repeats_for(double run_seconds, double sample_seconds) {
  return static_cast<int>(
      std::clamp(std::ceil(sample_seconds / std::max(run_seconds, 1e-9)), 1.0, 1e6));
}

ReplayCounts replay_counts(int repeats, Contender::WarmRun warm) {
  ReplayCounts counts;
  counts.calls = std::clamp(repeats / kFewestReplays, 1, kMostCalls);
  counts.replays = (repeats + counts.calls - 1) / counts.calls;
  if (warm == Contender::WarmRun::kUncounted) {
    counts.uncounted = (counts.replays + kUncountedShare - 1) / kUncountedShare;
  }
  return counts;
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
