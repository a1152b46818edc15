// The one way to say no: every refusal names the call, the argument, the value it got and the rule
// that value breaks. Nothing here runs unless something is refused.
//
//   return refuse("forward", "k.dim_qk", show(96), must("equal q.dim_qk = 128"));
//   // forward: k.dim_qk is 96, must equal q.dim_qk = 128
//   return refuse("backward", "dbias", "given", but("the problem has no bias"));
//   // backward: dbias is given but the problem has no bias
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/device.h"
#include "fovea/status.h"
#include "fovea/tensor.h"

namespace fovea {

// Values as messages print them.
std::string show(int64_t value);
std::string show(double value);
std::string show(DType value);
std::string show(Device value);  // "cpu", "cuda:1"
std::string show(const void* pointer);

// What was asked of the value, as the end of the sentence. Only the functions below make one.
class Rule {
 public:
  const std::string& text() const { return text_; }

 private:
  explicit Rule(std::string text) : text_(std::move(text)) {}
  friend Rule must(std::string_view what);
  friend Rule but(std::string_view what);
  std::string text_;
};
Rule must(std::string_view what);                       // ", must <what>"
Rule but(std::string_view what);                        // " but <what>"
Rule must_equal(std::string_view name, int64_t value);  // ", must equal <name> = <value>"
Rule must_be_in(int64_t first, int64_t last);           // ", must be in <first>..<last>"
Rule must_be_at_least(int64_t least);                   // ", must be at least <least>"
Rule must_be_given();                                   // ", must be given"

// kInvalidArgument: "<call>: <argument> is <value><rule>".
Status refuse(std::string_view call, std::string_view argument, std::string_view value,
              const Rule& rule);

// Why one engine cannot take a problem that is right in itself.
struct EngineRefusal {
  std::string engine;
  std::vector<std::string> reasons;
};

// kUnsupported: "<call>: <what>", then a line per reason in columns, then the hint where there is
// one.
Status unsupported(std::string_view call, std::string_view what,
                   const std::vector<EngineRefusal>& refusals, std::string_view hint = {});

// The lines of `unsupported`, also part of Plan::explain: "  <engine>  <reason>" each.
std::string refusal_lines(const std::vector<EngineRefusal>& refusals);

}  // namespace fovea
