// Writes a case as its line of text, and the lengths it means.
#include <algorithm>
#include <charconv>
#include <numeric>

#include "harness/case.h"
#include "harness/case_names.h"
#include "harness/random.h"

namespace fovea::harness {
namespace {

std::string number(double x) {  // the shortest text that reads back as x
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, x).ptr;
  return std::string(text, end);
}

std::string number(int64_t x) { return std::to_string(x); }

std::string list(const std::vector<int32_t>& lengths) {
  std::string text;
  for (const int32_t n : lengths) text += (text.empty() ? "" : ",") + std::to_string(n);
  return text;
}

std::string bound(int64_t x) { return x == Mask::kUnbounded ? "inf" : number(x); }

std::string mask_text(const Mask& mask) {
  if (mask.left == Mask::kUnbounded && mask.right == Mask::kUnbounded) return "none";
  if (mask.left == Mask::kUnbounded && mask.right == 0) return "causal";
  return "window:" + bound(mask.left) + ":" + bound(mask.right);
}

std::string broadcast_text(const std::array<bool, 3>& dims) {
  std::string text;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i]) text += "bhq"[i];
  }
  return text.empty() ? "full" : text;
}

std::vector<int32_t> drawn(int64_t count, int64_t longest, uint64_t seed) {
  std::vector<int32_t> lengths;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = hash64(seed ^ hash64(static_cast<uint64_t>(i)));
    lengths.push_back(static_cast<int32_t>(word % static_cast<uint64_t>(longest + 1)));
  }
  if (count > 0) {  // the sizes of a problem are its longest sequence's
    lengths[hash64(seed) % static_cast<uint64_t>(count)] = static_cast<int32_t>(longest);
  }
  return lengths;
}

}  // namespace

std::string format_case(const Case& c) {
  const AttentionProblem& p = c.problem;
  std::string text;
  const auto put = [&text](const std::string& word) { text += (text.empty() ? "" : " ") + word; };
  put("b=" + number(p.batch));
  put("hq=" + number(p.head_q));
  put("hkv=" + number(p.head_kv));
  put("q=" + number(p.q_len));
  put("kv=" + number(p.kv_len));
  put("d=" + number(p.dim_qk));
  put("dv=" + number(p.dim_v));
  put(std::string("dtype=") + name_of(kDTypeNames, p.dtype));
  put("mask=" + mask_text(p.mask));
  if (p.mask.prefix != 0) put("prefix=" + number(p.mask.prefix));
  if (has(p.features, Feature::kBias)) put("bias=" + broadcast_text(c.bias_broadcast));
  if (c.bias_f32) put("bias_dtype=f32");
  if (has(p.features, Feature::kBoolMask)) put("boolmask=" + broadcast_text(c.mask_broadcast));
  if (has(p.features, Feature::kAlibi)) put(c.alibi_per_batch ? "alibi=batch" : "alibi");
  if (has(p.features, Feature::kSink)) put("sink");
  if (p.softcap != 0) put("softcap=" + number(p.softcap));
  if (p.dropout != 0) put("dropout=" + number(p.dropout));
  if (p.scale) put("scale=" + number(*p.scale));
  if (p.logit_bound) put("logit_bound=" + number(*p.logit_bound));
  if (has(p.features, Feature::kKeyLengths)) put("keylens");
  if (p.layout == Layout::kPacked) put("varlen");
  if (!c.q_lens.empty()) put("q_lens=" + list(c.q_lens));
  if (!c.kv_lens.empty()) put("kv_lens=" + list(c.kv_lens));
  if (c.want_dbias) put("dbias");
  if (c.want_dlse) put("dlse");
  put(std::string("pass=") + (c.forward ? (c.backward ? "fwd,bwd" : "fwd") : "bwd"));
  if (c.order != TensorOrder::kBhsd) put(std::string("order=") + name_of(kOrderNames, c.order));
  if (c.pad != 0) put("pad=" + number(c.pad));
  if (c.data != DataFamily::kNormal) put(std::string("data=") + name_of(kDataNames, c.data));
  if (c.seed != 1) put("seed=" + std::to_string(c.seed));
  if (p.determinism == Determinism::kRequired) put("deterministic");
  if (p.tf32 == Tf32::kAllowed) put("tf32");
  return text;
}

CaseLengths lengths_of(const Case& c) {
  const AttentionProblem& p = c.problem;
  return {c.q_lens.empty() ? drawn(p.batch, p.q_len, c.seed * 2) : c.q_lens,
          c.kv_lens.empty() ? drawn(p.batch, p.kv_len, c.seed * 2 + 1) : c.kv_lens};
}

void set_totals(Case& c) {
  if (c.problem.layout != Layout::kPacked) return;
  const CaseLengths lengths = lengths_of(c);
  c.problem.total_q = std::accumulate(lengths.q.begin(), lengths.q.end(), int64_t{0});
  c.problem.total_kv = std::accumulate(lengths.kv.begin(), lengths.kv.end(), int64_t{0});
}

}  // namespace fovea::harness
