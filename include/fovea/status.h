// Errors as values. No call of this library throws, aborts or prints: it returns a Status, or a
// Result<T> that holds either a T or the Status that says why there is none.
//
//   fovea::Result<fovea::Plan> plan = fovea::make_plan(problem, fovea::Device::cpu());
//   if (!plan.ok()) {
//     std::fputs(plan.status().message().c_str(), stderr);  // make_plan: head_q is 30, must be ...
//     return;
//   }
//   plan->forward(...);
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace fovea {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument =
      1,             // the request itself is wrong: names the argument, its value, what is allowed
  kUnsupported = 2,  // the request is right, but no engine here can do it: carries the reasons
  kOutOfMemory = 3,
  kInternal = 4,  // a fault of the library or of the device underneath
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// Either a value or the error that kept it from being made. Dereference only when ok().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace fovea
