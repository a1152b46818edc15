// Draws the bar.
#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace fovea::cli {
namespace {

constexpr size_t kBarWidth = 24;

size_t terminal_columns() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

std::string minutes(double seconds) {
  const long whole = std::lround(seconds);
  char text[32];
  std::snprintf(text, sizeof text, "%ld:%02ld", whole / 60, whole % 60);
  return text;
}

}  // namespace

Progress::Progress(double total) : terminal_(::isatty(STDERR_FILENO) == 1), total_(total) {}

Progress::~Progress() { clear(); }

void Progress::begin_step(const std::string& what) {
  what_ = what;
  if (terminal_) draw();
}

void Progress::end_step(double work, const std::string& outcome) {
  done_ += work;
  if (terminal_) {
    draw();
    return;
  }
  std::fprintf(stderr, "[%3.0f %%] %s: %s\n", 100 * std::min(1.0, done_ / total_), what_.c_str(),
               outcome.c_str());
}

void Progress::note(const std::string& line) {
  clear();
  std::fprintf(stderr, "%s\n", line.c_str());
  if (terminal_) draw();
}

void Progress::draw() {
  const double fraction = total_ > 0 ? std::min(1.0, done_ / total_) : 1;
  const auto filled = static_cast<size_t>(fraction * kBarWidth);
  const double elapsed =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  std::string line = "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] ";
  char percent[16];
  std::snprintf(percent, sizeof percent, "%3.0f %%", 100 * fraction);
  line += percent;
  if (fraction > 0) line += "  ETA " + minutes(elapsed * (1 - fraction) / fraction);
  line += "  " + what_;
  line.resize(std::min(line.size(), terminal_columns() - 1));
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

}  // namespace fovea::cli
