// `fovea compare`: two result files of `fovea bench`, row by row.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/json.h"
#include "cli/table.h"
#include "cli/timing.h"

namespace fovea::cli {
namespace {

struct Measured {
  std::string case_text, impl, pass, dtype;
  double ms = 0;
  bool wrong = false;
};

// Rows by what they measured; nothing, with a message printed, where the file is not a result.
std::optional<std::map<std::string, Measured>> read_rows(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    std::fprintf(stderr, "compare: cannot read %s\n", path.c_str());
    return std::nullopt;
  }
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("rows") || !json["rows"].is_array()) {
    std::fprintf(stderr, "compare: %s is not a result of `fovea bench --json`\n", path.c_str());
    return std::nullopt;
  }
  std::map<std::string, Measured> rows;
  for (const Json& row : json["rows"]) {
    try {
      Measured m{row.at("case"), row.at("impl"), row.at("pass"), row.at("dtype"), row.at("ms")};
      m.wrong = row.at("ok").is_boolean() && !row.at("ok").get<bool>();
      const std::string key = m.case_text + "|" + m.pass + "|" + m.impl;
      rows.emplace(key, std::move(m));
    } catch (const Json::exception& error) {
      std::fprintf(stderr, "compare: %s: a row is not as `fovea bench --json` writes it: %s\n",
                   path.c_str(), error.what());
      return std::nullopt;
    }
  }
  return rows;
}

struct Pair {
  const Measured* before;
  const Measured* after;
  double ratio() const { return before->ms / after->ms; }
};

std::string pairs_table(const std::vector<Pair>& pairs) {
  Table table;
  table.add_column("impl", Table::Align::kLeft);
  table.add_column("pass", Table::Align::kLeft);
  for (const char* title : {"before ms", "after ms", "ratio"}) {
    table.add_column(title, Table::Align::kRight);
  }
  table.add_column("case", Table::Align::kLeft);
  for (const Pair& pair : pairs) {
    table.add_row({pair.after->impl, pair.after->pass, format_ms(pair.before->ms),
                   format_ms(pair.after->ms), format("%.3f", pair.ratio()),
                   pair.after->case_text + (pair.after->wrong ? "  WRONG" : "")});
  }
  return table.text();
}

std::string means_table(const std::vector<Pair>& pairs) {
  std::map<std::string, std::vector<double>> groups;
  for (const Pair& pair : pairs) {
    groups[pair.after->impl + " " + pair.after->dtype + " " + pair.after->pass].push_back(
        pair.ratio());
  }
  Table table;
  table.add_column("group", Table::Align::kLeft);
  for (const char* title : {"rows", "geometric mean", "worst"}) {
    table.add_column(title, Table::Align::kRight);
  }
  for (const auto& [group, ratios] : groups) {
    table.add_row({group, std::to_string(ratios.size()), format("%.3f", geometric_mean(ratios)),
                   format("%.3f", *std::min_element(ratios.begin(), ratios.end()))});
  }
  return table.text();
}

}  // namespace

int run_compare(const CompareOptions& options) {
  const auto before = read_rows(options.before);
  const auto after = read_rows(options.after);
  if (!before || !after) return kExitUsage;
  std::vector<Pair> pairs;
  std::string missing;
  for (const auto& [key, row] : *before) {
    const auto at = after->find(key);
    if (at != after->end() && row.ms > 0 && at->second.ms > 0) {
      pairs.push_back({&row, &at->second});
    } else {
      missing += "  " + row.impl + " " + row.pass + "  " + row.case_text + "\n";
    }
  }
  if (pairs.empty()) {
    std::fprintf(stderr, "compare: %s and %s have no row in common\n", options.before.c_str(),
                 options.after.c_str());
    return kExitUsage;
  }
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const Pair& a, const Pair& b) { return a.ratio() < b.ratio(); });
  std::printf("Time before over time after (above 1: faster now), the worst first\n%s\n%s",
              pairs_table(pairs).c_str(), means_table(pairs).c_str());
  if (!missing.empty()) std::printf("\nOnly in %s\n%s", options.before.c_str(), missing.c_str());

  int code = kExitOk;
  for (const Pair& pair : pairs) {
    if (pair.after->wrong && !pair.before->wrong) {
      std::printf("\nWRONG now: %s %s  %s\n", pair.after->impl.c_str(), pair.after->pass.c_str(),
                  pair.after->case_text.c_str());
      code = kExitFailed;
    }
  }
  if (options.fail_under > 0) {
    const auto slow = std::count_if(pairs.begin(), pairs.end(), [&](const Pair& pair) {
      return pair.ratio() < options.fail_under;
    });
    std::printf("\n%ld of %zu rows are under --fail-under %g\n", static_cast<long>(slow),
                pairs.size(), options.fail_under);
    if (slow > 0) code = kExitFailed;
  }
  return code;
}

}  // namespace fovea::cli
