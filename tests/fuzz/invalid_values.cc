// Mutations of what a request holds besides single tensors: which are given, the values of lengths,
// the workspace.
#include "fuzz/invalid_mutations.h"

namespace fovea::invalid {
namespace {

std::string missing(Subject& s) {
  std::vector<Argument> there = s.given();
  std::erase_if(there, [](const Argument& a) { return a.optional; });
  const Argument& a = s.random.pick(there);
  *a.view = {};
  return a.name + " is not given";
}

// A tensor, of a right shape, that the problem does not declare.
std::string undeclared(Subject& s) {
  const AttentionProblem& p = s.problem;
  std::vector<Argument> absent = s.arguments;
  std::erase_if(absent, [&](const Argument& a) {
    const bool may_come = a.name == "lse" || a.name == "dlse" ||
                          (a.name == "dbias" && s.inputs.bias.given()) ||
                          (a.name == "dsink" && s.inputs.sink.given());
    return a.view->given() || may_come;
  });
  if (absent.empty()) return {};
  const Argument& a = s.random.pick(absent);
  if (a.name == "bias" || a.name == "mask" || a.name == "dbias") {
    *a.view = s.dense(a.dtypes[0], {1, 1, 1, p.kv_len});
  } else if (a.name == "key_lengths") {
    *a.view = s.dense(DType::kI32, {p.batch});
  } else if (a.name == "cu_seqlens_q" || a.name == "cu_seqlens_kv") {
    *a.view = s.dense(DType::kI32, {p.batch + 1});
  } else {
    *a.view = s.dense(a.dtypes[0], {p.head_q});
  }
  s.arena.remember();
  return a.name + " is given but the problem has no ";
}

std::string key_length(Subject& s) {
  if (!s.inputs.key_lengths.given() || s.problem.batch == 0) return {};
  const int64_t b = s.random.range(0, s.problem.batch - 1);
  auto* values = static_cast<int32_t*>(s.inputs.key_lengths.data);
  values[b] = static_cast<int32_t>(
      s.random.pick<int64_t>({-1, s.problem.kv_len + 1, INT32_MAX, INT32_MIN}));
  s.arena.remember();
  return "key_lengths[" + std::to_string(b) + "] is ";
}

std::string cu_seqlens(Subject& s) {
  if (s.problem.layout != Layout::kPacked) return {};
  const bool q = s.random.chance(50);
  const TensorView& t = q ? s.inputs.cu_seqlens_q : s.inputs.cu_seqlens_kv;
  const int64_t longest = q ? s.problem.q_len : s.problem.kv_len;
  auto* values = static_cast<int32_t*>(t.data);
  if (s.random.chance(30)) {  // one row more or less than the tensor has
    values[s.problem.batch] += s.random.chance(50) ? 1 : -1;
    s.arena.remember();
    return q ? "cu_seqlens_q[" : "cu_seqlens_kv[";
  }
  const int64_t at = s.random.range(0, s.problem.batch);
  // Far from any neighbour: it breaks the first value, the order, a length or the total, and the
  // message names this element or the next.
  const auto far = static_cast<int32_t>(2 * longest + 1);
  values[at] = s.random.pick<int32_t>({values[at] - far, values[at] + far, INT32_MAX, INT32_MIN});
  s.arena.remember();
  return q ? "cu_seqlens_q[" : "cu_seqlens_kv[";
}

std::string workspace(Subject& s) {
  if (s.workspace_needed == 0) return {};
  switch (s.random.range(0, 2)) {
    case 0: s.workspace.data = nullptr; return "workspace.data is null";
    case 1:
      s.workspace.bytes = s.workspace_needed - static_cast<size_t>(s.random.range(
                                                   1, static_cast<int64_t>(s.workspace_needed)));
      return "workspace.bytes is ";
    default:
      s.workspace.data = static_cast<char*>(s.workspace.data) + s.random.range(1, 63);
      return "workspace.data is 0x";
  }
}

constexpr Mutation kValueMutations[] = {
    {"missing", missing, false},       {"undeclared", undeclared, false},
    {"key_length", key_length, false}, {"cu_seqlens", cu_seqlens, false},
    {"workspace", workspace, false},
};

}  // namespace

std::span<const Mutation> value_mutations() { return kValueMutations; }

}  // namespace fovea::invalid
