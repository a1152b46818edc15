// Reads a case from its line of text.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "harness/case.h"
#include "harness/case_words.h"

namespace fovea::harness {
namespace {

Status read_real(const Item& item, double& out) {
  if (!read_number(item.value, out) || !std::isfinite(out)) return wrong(item, "a finite number");
  return {};
}

Status read_real(const Item& item, std::optional<double>& out) {
  double value = 0;
  if (Status s = read_real(item, value); !s.ok()) return s;
  out = value;
  return {};
}

Status read_lengths(const Item& item, std::vector<int32_t>& out) {
  out.clear();
  std::istringstream parts(item.value);
  std::string part;
  while (std::getline(parts, part, ',')) {
    int32_t length = 0;
    if (!read_number(part, length) || length < 0) return wrong(item, "lengths such as 3,0,5");
    out.push_back(length);
  }
  if (out.empty()) return wrong(item, "lengths such as 3,0,5");
  return {};
}

Status read_broadcast(const Item& item, std::array<bool, 3>& out) {
  out = {};
  if (item.bare || item.value == "full" || item.value == "1") return {};
  for (const char letter : item.value) {
    const size_t at = std::string("bhq").find(letter);
    if (at == std::string::npos)
      return wrong(item, "full, or letters of b, h, q to broadcast over");
    out[at] = true;
  }
  if (item.value.empty()) return wrong(item, "full, or letters of b, h, q to broadcast over");
  return {};
}

Status read_bound(const Item& item, const std::string& text, int64_t& out) {
  out = Mask::kUnbounded;
  if (text == "inf") return {};
  if (!read_number(text, out) || out < 0) return wrong(item, "none, causal or window:LEFT:RIGHT");
  return {};
}

Status read_mask(const Item& item, Mask& out) {
  const int64_t prefix = out.prefix;
  if (item.value == "none") {
    out = Mask::none();
  } else if (item.value == "causal") {
    out = Mask::causal();
  } else {
    const size_t colon = item.value.find(':', 7);
    if (item.value.rfind("window:", 0) != 0 || colon == std::string::npos)
      return wrong(item, "none, causal or window:LEFT:RIGHT");
    Status s = read_bound(item, item.value.substr(7, colon - 7), out.left);
    if (s.ok()) s = read_bound(item, item.value.substr(colon + 1), out.right);
    if (!s.ok()) return s;
  }
  out.prefix = prefix;
  return {};
}

Status read_pass(const Item& item, Case& c) {
  c.forward = item.value == "fwd" || item.value == "fwd,bwd";
  c.backward = item.value == "bwd" || item.value == "fwd,bwd";
  if (!c.forward && !c.backward) return wrong(item, "fwd, bwd or fwd,bwd");
  return {};
}

// Keys that stand alone: their presence is their meaning.
bool read_flag(const Item& item, Case& c) {
  AttentionProblem& p = c.problem;
  if (item.key == "sink") {
    p.features = p.features | Feature::kSink;
  } else if (item.key == "varlen") {
    p.layout = Layout::kPacked;
  } else if (item.key == "deterministic") {
    p.determinism = Determinism::kRequired;
  } else if (item.key == "tf32") {
    p.tf32 = Tf32::kAllowed;
  } else if (item.key == "dbias") {
    c.want_dbias = true;
  } else if (item.key == "dlse") {
    c.want_dlse = true;
  } else {
    return false;
  }
  return true;
}

// Sizes whose default is another size, remembered until the whole line is read.
struct Defaults {
  bool head_kv = true, kv_len = true, dim_v = true, q_len = true, dim_qk = true;
};

Status read_item(const Item& item, Case& c, Defaults& absent) {
  AttentionProblem& p = c.problem;
  const std::string& key = item.key;
  if (read_flag(item, c)) {
    return item.bare || item.value == "1" ? Status() : wrong(item, "1, or the key alone");
  }
  if (key == "b") return read_size(item, p.batch);
  if (key == "hq") return read_size(item, p.head_q);
  if (key == "hkv") return absent.head_kv = false, read_size(item, p.head_kv);
  if (key == "q") return absent.q_len = false, read_size(item, p.q_len);
  if (key == "kv") return absent.kv_len = false, read_size(item, p.kv_len);
  if (key == "d") return absent.dim_qk = false, read_size(item, p.dim_qk);
  if (key == "dv") return absent.dim_v = false, read_size(item, p.dim_v);
  if (key == "dtype") return read_name(item, kDTypeNames, p.dtype);
  if (key == "mask") return read_mask(item, p.mask);
  if (key == "prefix") return read_size(item, p.mask.prefix);
  if (key == "pass") return read_pass(item, c);
  if (key == "softcap") return read_real(item, p.softcap);
  if (key == "dropout") return read_real(item, p.dropout);
  if (key == "scale") return read_real(item, p.scale);
  if (key == "logit_bound") return read_real(item, p.logit_bound);
  if (key == "order") return read_name(item, kOrderNames, c.order);
  if (key == "data") return read_name(item, kDataNames, c.data);
  if (key == "pad") return read_size(item, c.pad);
  if (key == "q_lens") return read_lengths(item, c.q_lens);
  if (key == "kv_lens") return read_lengths(item, c.kv_lens);
  if (key == "seed") return read_seed(item, c.seed);
  if (key == "bias") {
    p.features = p.features | Feature::kBias;
    return read_broadcast(item, c.bias_broadcast);
  }
  if (key == "boolmask") {
    p.features = p.features | Feature::kBoolMask;
    return read_broadcast(item, c.mask_broadcast);
  }
  if (key == "bias_dtype") {
    c.bias_f32 = item.value == "f32";
    return c.bias_f32 ? Status() : wrong(item, "f32");
  }
  if (key == "alibi") {
    p.features = p.features | Feature::kAlibi;
    c.alibi_per_batch = item.value == "batch";
    return item.bare || c.alibi_per_batch ? Status() : wrong(item, "batch, or the key alone");
  }
  if (key == "keylens") {
    p.features = p.features | Feature::kKeyLengths;
    return item.bare ? Status() : read_lengths(item, c.kv_lens);
  }
  return unknown_key(item);
}

Status check_lengths(const char* key, const std::vector<int32_t>& lengths, int64_t batch,
                     int64_t longest) {
  if (lengths.empty()) return {};
  if (static_cast<int64_t>(lengths.size()) != batch) {
    return {StatusCode::kInvalidArgument, std::string("parse_case: ") + key + " has " +
                                              std::to_string(lengths.size()) +
                                              " lengths, must have b = " + std::to_string(batch)};
  }
  const int32_t most = *std::max_element(lengths.begin(), lengths.end());
  if (most > longest) {
    return {StatusCode::kInvalidArgument, std::string("parse_case: ") + key + " holds " +
                                              std::to_string(most) + ", must be at most " +
                                              std::to_string(longest)};
  }
  return {};
}

}  // namespace

Result<Case> parse_case(const std::string& text) {
  Case c;
  AttentionProblem& p = c.problem;
  p.batch = 1;
  p.head_q = 1;
  Defaults absent;
  for (const Item& item : split_words(text)) {
    if (Status s = read_item(item, c, absent); !s.ok()) return s;
  }
  if (absent.q_len) return Status(StatusCode::kInvalidArgument, "parse_case: q is missing");
  if (absent.dim_qk) return Status(StatusCode::kInvalidArgument, "parse_case: d is missing");
  if (absent.head_kv) p.head_kv = p.head_q;
  if (absent.kv_len) p.kv_len = p.q_len;
  if (absent.dim_v) p.dim_v = p.dim_qk;
  Status s = check_lengths("q_lens", c.q_lens, p.batch, p.q_len);
  if (s.ok()) s = check_lengths("kv_lens", c.kv_lens, p.batch, p.kv_len);
  if (!s.ok()) return s;
  set_totals(c);
  return c;
}

}  // namespace fovea::harness
