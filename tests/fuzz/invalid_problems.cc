// Mutations of the problem and the options of a plan.
#include <cmath>
#include <limits>

#include "fuzz/invalid_mutations.h"

namespace fovea::invalid {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

struct Field {
  const char* name;
  int64_t AttentionProblem::*member;
};

std::string negative_length(Subject& s) {
  const auto [name, member] = s.random.pick<Field>({{"batch", &AttentionProblem::batch},
                                                    {"q_len", &AttentionProblem::q_len},
                                                    {"kv_len", &AttentionProblem::kv_len}});
  s.problem.*member = s.random.pick<int64_t>({-1, -100, std::numeric_limits<int64_t>::min()});
  return std::string(name) + " is ";
}

std::string nonpositive_size(Subject& s) {
  const auto [name, member] = s.random.pick<Field>({{"head_q", &AttentionProblem::head_q},
                                                    {"head_kv", &AttentionProblem::head_kv},
                                                    {"dim_qk", &AttentionProblem::dim_qk},
                                                    {"dim_v", &AttentionProblem::dim_v}});
  s.problem.*member = s.random.pick<int64_t>({0, -1, std::numeric_limits<int64_t>::min()});
  return std::string(name) + " is ";
}

std::string overflowing_size(Subject& s) {
  const Field field = s.random.pick<Field>({{"batch x q_len", &AttentionProblem::batch},
                                            {"batch x q_len", &AttentionProblem::q_len},
                                            {"batch x kv_len", &AttentionProblem::kv_len},
                                            {"batch x q_len", &AttentionProblem::dim_qk},
                                            {"batch x q_len", &AttentionProblem::dim_v}});
  s.problem.*field.member = s.random.pick<int64_t>({kHuge, kHuge / 2, kHuge / 7});
  return field.name;
}

std::string head_ratio(Subject& s) {
  s.problem.head_kv = s.random.range(2, 4);
  s.problem.head_q = s.problem.head_kv * s.random.range(1, 3) + 1;
  return "head_q is ";
}

std::string problem_dtype(Subject& s) {
  s.problem.dtype = s.random.pick<DType>(
      {DType::kBool, DType::kI32, static_cast<DType>(-1), static_cast<DType>(6)});
  return "dtype is ";
}

std::string problem_enum(Subject& s) {
  const int bad = static_cast<int>(s.random.pick<int64_t>({-1, 2, 1000}));
  switch (s.random.range(0, 3)) {
    case 0: s.problem.layout = static_cast<Layout>(bad); return "layout is ";
    case 1: s.problem.determinism = static_cast<Determinism>(bad); return "determinism is ";
    case 2: s.problem.tf32 = static_cast<Tf32>(bad); return "tf32 is ";
    default:
      s.problem.features = s.problem.features | static_cast<Feature>(uint32_t{32} << (bad & 7));
      return "features is ";
  }
}

std::string mask_field(Subject& s) {
  const int64_t bad = s.random.pick<int64_t>({-2, -50, std::numeric_limits<int64_t>::min()});
  switch (s.random.range(0, 2)) {
    case 0: s.problem.mask.left = bad; return "mask.left is ";
    case 1: s.problem.mask.right = bad; return "mask.right is ";
    default: s.problem.mask.prefix = bad; return "mask.prefix is ";
  }
}

std::string scalar(Subject& s) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  switch (s.random.range(0, 3)) {
    case 0: s.problem.scale = s.random.pick<double>({inf, -inf, nan}); return "scale is ";
    case 1:
      s.problem.softcap = s.random.pick<double>({-1, -1e-300, inf, nan});
      return "softcap is ";
    case 2: s.problem.dropout = s.random.pick<double>({-0.1, 1, 2, inf, nan}); return "dropout is ";
    default:
      s.problem.logit_bound = s.random.pick<double>({0, -1, inf, nan});
      return "logit_bound is ";
  }
}

std::string total_rows(Subject& s) {
  const bool q = s.random.chance(50);
  int64_t& total = q ? s.problem.total_q : s.problem.total_kv;
  const int64_t most = s.problem.batch * (q ? s.problem.q_len : s.problem.kv_len);
  if (s.problem.layout == Layout::kDense) {
    total = s.random.pick<int64_t>({1, -1, kHuge});
  } else {
    total = s.random.pick<int64_t>({-1, most + 1, int64_t{1} << 31, kHuge});
  }
  return q ? "total_q is " : "total_kv is ";
}

std::string packed_key_lengths(Subject& s) {
  if (s.problem.layout != Layout::kPacked) return {};
  s.problem.features = s.problem.features | Feature::kKeyLengths;
  return "features is ";
}

std::string bad_options(Subject& s) {
  if (s.random.chance(50)) {
    s.options.backend = s.random.pick<std::string>({"CPU", "cuda9", "reference ", "x"});
    return "options.backend is ";
  }
  s.options.threads = static_cast<int>(s.random.pick<int64_t>({-1, -1000, 1 << 20}));
  return "options.threads is ";
}

constexpr Mutation kProblemMutations[] = {
    {"negative_length", negative_length, true},
    {"nonpositive_size", nonpositive_size, true},
    {"overflowing_size", overflowing_size, true},
    {"head_ratio", head_ratio, true},
    {"problem_dtype", problem_dtype, true},
    {"problem_enum", problem_enum, true},
    {"mask_field", mask_field, true},
    {"scalar", scalar, true},
    {"total_rows", total_rows, true},
    {"packed_key_lengths", packed_key_lengths, true},
    {"bad_options", bad_options, true},
};

}  // namespace

std::span<const Mutation> problem_mutations() { return kProblemMutations; }

}  // namespace fovea::invalid
