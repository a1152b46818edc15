// Whether the options and sizes of a layer make sense in themselves. The first fault stays.
#pragma once

#include <initializer_list>
#include <string_view>

#include "fovea/layers.h"

namespace fovea::layers {

class OptionCheck {
 public:
  void at_least(const char* name, int64_t value, int64_t least);
  void is(bool right, std::string_view name, std::string_view value, std::string_view must_what);
  void multiple(const char* name, int64_t value, const char* of_name, int64_t of);
  void finite(const char* name, double value);
  // The tensor of these sizes takes less than 2^60 bytes as f64, as do a handful of them together.
  void extent(const char* name, std::initializer_list<int64_t> sizes);

  void dtype(DType dtype);
  void shape(const LayerShape& shape, int64_t max_seq_len);
  void attends_to_itself(const LayerShape& shape);
  // As many as sums of a few of them can hold.
  void channels(const char* name, int64_t value, int64_t least);
  void rope(const RopeOptions& rope, int64_t dim);
  void window(int64_t sliding_window);
  void scale(const std::optional<double>& softmax_scale);
  // What LayerOptions holds besides head_dim, which a caller may leave to its default.
  void common(const LayerOptions& options, const LayerShape& shape);

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

// Of a head's `dim` channels, those that turn.
int64_t turning_channels(const RopeOptions& rope, int64_t dim);

// The mask by position that options say.
Mask mask_of(bool causal, int64_t sliding_window);

// head_dim, or the default where it is 0; refused where embed_dim has no such part.
int64_t head_dim_of(const LayerOptions& options, OptionCheck& check);

// The shape with kv_len filled in.
LayerShape with_kv_len(const LayerShape& shape);

}  // namespace fovea::layers
