// A small valid request to spoil: a problem, every tensor of both passes, and memory whose every
// byte is known, so that a refused call can be shown to have written nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fovea/plan.h"

namespace fovea::invalid {

// SplitMix64: a case is its seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t word();
  int64_t range(int64_t first, int64_t last) {  // both included
    return first + static_cast<int64_t>(word() % static_cast<uint64_t>(last - first + 1));
  }
  bool chance(int percent) { return range(0, 99) < percent; }
  template <typename T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(range(0, static_cast<int64_t>(from.size()) - 1))];
  }

 private:
  uint64_t state_;
};

// Memory of all tensors of a subject. Outputs are canary bytes until somebody writes them.
class Arena {
 public:
  Arena();
  void* take(int64_t bytes, std::byte fill);
  void remember() { copy_.assign(memory_.get(), memory_.get() + used_); }
  bool unchanged() const;

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t used_ = 0;
  std::vector<std::byte> copy_;
};

enum class Use { kInput, kOutput };

// One tensor as the mutations know it. `view` points into the subject.
struct Argument {
  std::string name;
  TensorView* view = nullptr;
  Use use = Use::kInput;
  std::vector<DType> dtypes;  // that it may have
  bool broadcasts = false;    // a leading dimension may be 1
  bool any_last_stride = false;
  bool optional = false;  // may be left out without anything else changing
};

struct Subject {
  explicit Subject(uint64_t seed);
  Subject(const Subject&) = delete;  // arguments point into it
  Subject& operator=(const Subject&) = delete;

  Status run() const;  // the call under test, through the public API
  const char* call() const { return pass == Pass::kForward ? "forward" : "backward"; }
  std::vector<Argument> given() const;  // the arguments that are there
  Argument& argument(const std::string& name);
  TensorView dense(DType dtype, std::initializer_list<int64_t> sizes);  // a further input

  AttentionProblem problem;
  PlanOptions options;
  Pass pass = Pass::kForward;
  AttentionInputs inputs;
  TensorView out, lse, dout, dlse, dq, dk, dv, dbias, dsink;
  std::vector<Argument> arguments;  // all of this pass, in the order of the checks
  Workspace workspace;
  size_t workspace_needed = 0;
  Arena arena;
  Random random;

 private:
  void draw_problem();
  void draw_tensors();
  void list_arguments();
  TensorView place(DType dtype, std::vector<int64_t> sizes, Use use);
  TensorView place_rows(int64_t len, int64_t total, int64_t heads, int64_t dim, Use use);
  TensorView place_lse(Use use);
  TensorView place_scores(DType dtype);
};

bool nonempty(const TensorView& t);

// Cases to run: FOVEA_FUZZ_INVALID, 5000 when it is not set; and the first seed:
// FOVEA_FUZZ_INVALID_SEED, 1 when it is not set.
uint64_t case_count();
uint64_t first_seed();
std::string reproduce(uint64_t seed, const char* mutation);

}  // namespace fovea::invalid
