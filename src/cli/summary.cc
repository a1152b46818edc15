// Lays rows out: fovea's columns, then two for each peer.
#include "cli/summary.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "cli/table.h"
#include "cli/timing.h"

namespace fovea::cli {
namespace {

using Align = Table::Align;

// Rows measured together. The same implementation again is the same case asked for twice.
bool same_measurement(const Row& a, const Row& b) {
  return a.suite == b.suite && a.case_text == b.case_text && a.pass == b.pass && a.impl != b.impl;
}

// A line of the table: the subject's row, and the peers' of the same case and pass.
struct Line {
  const Row* subject = nullptr;
  std::map<std::string, const Row*> peers;  // by impl
};

std::vector<Line> lines_of(const std::vector<Row>& rows) {
  std::vector<Line> lines;
  for (const Row& row : rows) {
    if (lines.empty() || !same_measurement(*lines.back().subject, row)) {
      lines.push_back({&row, {}});
    } else {
      lines.back().peers[row.impl] = &row;
    }
  }
  return lines;
}

std::vector<std::string> peers_of(const std::vector<Line>& lines) {
  std::vector<std::string> names;
  for (const Line& line : lines) {
    for (const auto& [name, row] : line.peers) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

std::string verdict_text(const Row& row) {
  if (!row.ok) return "not checked";
  if (!row.max_err || !row.err_bound) return *row.ok ? "ok" : "WRONG";
  const std::string share =
      *row.err_bound > 0 ? format("%.2f", *row.max_err / *row.err_bound) : "0.00";
  return *row.ok ? share : "WRONG " + share;
}

// What a case has beside its sizes, dtype, mask and pass: "sink softcap=30". The table has columns
// for the rest.
std::string extras_of(const Row& row) {
  static constexpr const char* kShown[] = {"b",  "hq",    "hkv",  "q",      "kv",  "d",
                                           "dv", "dtype", "mask", "prefix", "pass"};
  std::string extras;
  size_t at = 0;
  while (at < row.case_text.size()) {
    const size_t end = std::min(row.case_text.find(' ', at), row.case_text.size());
    const std::string word = row.case_text.substr(at, end - at);
    const std::string key = word.substr(0, word.find('='));
    const bool shown = std::any_of(std::begin(kShown), std::end(kShown),
                                   [&](const char* name) { return key == name; });
    if (!shown && !word.empty()) extras += " " + word;
    at = end + 1;
  }
  return extras;
}

std::string dims_text(const AttentionProblem& p) {
  if (p.dim_qk == p.dim_v) return std::to_string(p.dim_qk);
  return std::to_string(p.dim_qk) + "/" + std::to_string(p.dim_v);
}

std::string peer_ms(const Row& row) {
  return format_ms(row.ms) + (row.timing == "eager" ? " eager" : "") +
         (row.ok == false ? " WRONG" : "");
}

// Rates in the unit that suits the device.
struct RateUnit {
  const char* name;
  double per_tflops;
};

std::string lines_table(const std::vector<Line>& lines, const std::vector<std::string>& peers,
                        const RateUnit& unit) {
  Table table;
  table.add_column("dtype", Align::kLeft);
  table.add_column("pass", Align::kLeft);
  for (const char* title : {"b", "heads", "q", "kv", "d"}) table.add_column(title, Align::kRight);
  table.add_column("mask", Align::kLeft);
  table.add_column("kernel", Align::kLeft);
  for (const char* title : {"ms", "p10", "p90", unit.name, "GB/s", "peak", "err/bound"}) {
    table.add_column(title, Align::kRight);
  }
  for (const std::string& peer : peers) {
    table.add_column(peer + " ms", Align::kRight);
    table.add_column("ratio", Align::kRight);
  }
  for (const Line& line : lines) {
    const Row& row = *line.subject;
    const AttentionProblem& p = row.problem;
    std::vector<std::string> cells = {
        dtype_name(p.dtype),
        pass_text(row.pass),
        std::to_string(p.batch),
        heads_text(p),
        std::to_string(p.q_len),
        std::to_string(p.kv_len),
        dims_text(p),
        mask_text(p.mask) + extras_of(row),
        row.kernel,
        format_ms(row.ms),
        format_ms(row.ms_p10),
        format_ms(row.ms_p90),
        format("%.1f", unit.per_tflops * row.tflops),
        format("%.1f", row.gbps),
        row.peak_fraction ? format("%.0f %%", 100 * *row.peak_fraction) : "-",
        verdict_text(row)};
    for (const std::string& peer : peers) {
      const auto at = line.peers.find(peer);
      if (at == line.peers.end()) {
        cells.insert(cells.end(), {"-", "-"});
      } else {
        cells.push_back(peer_ms(*at->second));
        cells.push_back(format("%.2f", at->second->ms / row.ms));
      }
    }
    table.add_row(std::move(cells));
  }
  return table.text();
}

// The peer's time on a line; nothing where it did not run. kBestPeer is whoever was fastest there.
constexpr const char* kBestPeer = "best peer";
std::optional<double> time_of(const std::string& peer, const Line& line) {
  std::optional<double> ms;
  for (const auto& [name, row] : line.peers) {
    // fovea's own engines stand in the table; the peer to lead is another library's.
    const bool meant = peer == kBestPeer ? name.rfind("fovea-", 0) != 0 : name == peer;
    if (meant && (!ms || row->ms < *ms)) ms = row->ms;
  }
  return ms;
}

std::string means_table(const std::vector<Line>& lines, std::vector<std::string> peers) {
  const auto others = std::count_if(peers.begin(), peers.end(), [](const std::string& name) {
    return name.rfind("fovea-", 0) != 0;
  });
  if (others > 1) peers.emplace_back(kBestPeer);
  Table table;
  table.add_column("peer", Align::kLeft);
  table.add_column("dtype", Align::kLeft);
  table.add_column("pass", Align::kLeft);
  for (const char* title : {"cases", "geometric mean", "worst"}) {
    table.add_column(title, Align::kRight);
  }
  table.add_column("worst case", Align::kLeft);
  for (const std::string& peer : peers) {
    std::map<std::pair<std::string, BenchPass>, std::vector<std::pair<double, const Row*>>> groups;
    for (const Line& line : lines) {
      const std::optional<double> ms = time_of(peer, line);
      if (!ms) continue;
      const Row& row = *line.subject;
      groups[{dtype_name(row.problem.dtype), row.pass}].emplace_back(*ms / row.ms, &row);
    }
    for (const auto& [group, ratios] : groups) {
      std::vector<double> values;
      for (const auto& [ratio, row] : ratios) values.push_back(ratio);
      const auto worst = std::min_element(ratios.begin(), ratios.end());
      table.add_row({peer, group.first, pass_text(group.second), std::to_string(values.size()),
                     format("%.2f", geometric_mean(values)), format("%.2f", worst->first),
                     worst->second->case_text});
    }
  }
  return table.text();
}

// A line for each reason that an implementation gave, with the case or how many there were.
std::string skipped_lines(const std::vector<Skipped>& skipped) {
  std::vector<std::pair<Skipped, int>> reasons;  // the first of its kind, and their number
  for (const Skipped& s : skipped) {
    const auto same = std::find_if(reasons.begin(), reasons.end(), [&](const auto& reason) {
      return reason.first.impl == s.impl && reason.first.why == s.why;
    });
    if (same == reasons.end()) {
      reasons.emplace_back(s, 1);
    } else {
      ++same->second;
    }
  }
  std::string text;
  for (const auto& [s, count] : reasons) {
    text += "  " + s.impl + ": ";
    if (count > 1) text += std::to_string(count) + " cases, first ";
    text += (s.case_text.empty() ? "" : s.case_text + ": ") + s.why + "\n";
  }
  return text;
}

}  // namespace

std::string summary(const Results& results) {
  const std::vector<Line> lines = lines_of(results.rows);
  const std::vector<std::string> peers = peers_of(lines);
  std::string text;
  const RateUnit unit = results.gpu.empty() ? RateUnit{"GFLOP/s", 1e3} : RateUnit{"TFLOP/s", 1};
  if (!lines.empty()) text += lines_table(lines, peers, unit);
  if (!peers.empty()) {
    text += "\nTime of the peer over fovea's (above 1, fovea is faster)\n";
    text += means_table(lines, peers);
  }
  if (!results.skipped.empty()) text += "\nSkipped\n" + skipped_lines(results.skipped);
  return text;
}

}  // namespace fovea::cli
