// Tensors as plain lists in logical order, to compare two runs whatever their strides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/tensor.h"

namespace fovea::test {

std::vector<double> values_of(const TensorView& t);
// The bytes of every element: NaN equals NaN of the same bits, 0 is not -0.
std::vector<uint64_t> bits_of(const TensorView& t);

// A view of part of one dimension, and a view of one index of it with the dimension kept.
TensorView slice(const TensorView& t, int dim, int64_t begin, int64_t end);

void copy_values(const TensorView& from, const TensorView& to);  // same sizes
void fill_values(const TensorView& t, double value);

// The largest difference over the largest magnitude of b (at least `floor`). NaN where either is.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b,
                           double floor = 1e-3);

// What two ways of computing the same may differ by, relative to the largest magnitude.
double tolerance_of(DType dtype);

}  // namespace fovea::test
