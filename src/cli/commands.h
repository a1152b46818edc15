// The commands of the program: what each takes from the command line. Each returns the exit code:
// 0 done, 1 the answer is bad (a failed check, a regression), 2 the request was.
#pragma once

#include <string>
#include <vector>

namespace fovea::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

struct InfoOptions {
  bool json = false;
  bool support = false;  // the table of features and backends instead
};
int run_info(const InfoOptions& options);

struct CaseOptions {
  std::string text;     // "b=2 hq=8 q=1024 d=64"
  std::string backend;  // empty: the plan's choice
  std::string device = "cpu";
  int threads = 0;           // 0: the library's default
  bool running_max = false;  // of softmax, on the Hopper engine
};
int run_explain(const CaseOptions& options);
int run_check(const CaseOptions& options);

struct BenchOptions {
  std::vector<std::string> cases;  // case texts; they replace the suite
  std::vector<std::string> suites;
  std::vector<std::string> peers;
  std::string device;  // empty: the first GPU where there is one, else the CPU
  std::string backend;
  std::string filter;     // a regular expression on "suite case text"
  std::string cases_dir;  // empty: searched for
  std::string json_path;
  int threads = 0;
  double min_time = 0;  // seconds per implementation and pass; 0: the default
  bool list = false;
  bool running_max = false;
  bool quick = false;
  bool check = true;
};
int run_bench(const BenchOptions& options);

struct CompareOptions {
  std::string before;
  std::string after;
  double fail_under = 0;  // 0: never fail on speed
};
int run_compare(const CompareOptions& options);

}  // namespace fovea::cli
