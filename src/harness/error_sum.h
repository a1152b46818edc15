// The error of one output tensor, and of the plain formula beside it, collected value by value.
#pragma once

#include "harness/accuracy.h"

namespace fovea::harness {

class ErrorSum {
 public:
  // How far a result may be off beyond twice the plain formula's error.
  struct Floor {
    double absolute = 0;
    double relative = 0;  // of the largest magnitude, at least 1
    double scaled = 0;    // of the largest magnitude
    bool alike = false;   // all rows round alike, so that their rms is as good as their largest
  };

  // `together` neighbouring values share most of their error: a row's, whose weights are the same.
  ErrorSum(std::string tensor, DType dtype, int64_t together);

  void add(double result, double exact, double plain);
  // A value of the yardstick alone, from another draw of the data.
  void add_plain(double exact, double plain);
  Accuracy result(const Floor& floor) const;

 private:
  double independent_errors() const;

  std::string tensor_;
  double ulp_;  // of 1 in the output's dtype
  double together_;
  int64_t count_ = 0;
  int64_t plain_count_ = 0;
  bool wrong_kind_ = false;  // a NaN or infinity where the oracle has another, or none
  double max_ = 0, squares_ = 0, signed_ = 0;
  double plain_max_ = 0, plain_squares_ = 0, plain_fourths_ = 0;
  double magnitude_ = 0;
};

}  // namespace fovea::harness
