// Raw files of tensors.
#include "cli/peer_tensors.h"

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/json.h"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;

// Elements from the first to the last that a view reaches: its memory, gaps included.
int64_t span(const TensorView& t) {
  int64_t last = 0;
  for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) {
    if (t.sizes[i] == 0) return 0;
    last += (t.sizes[i] - 1) * t.strides[i];
  }
  return last + 1;
}

}  // namespace

Json describe_tensor(const TensorView& t) {
  Json sizes = Json::array(), strides = Json::array();
  for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) {
    sizes.push_back(t.sizes[i]);
    strides.push_back(t.strides[i]);
  }
  return {{"dtype", dtype_name(t.dtype)},
          {"sizes", sizes},
          {"strides", strides},
          {"elements", span(t)}};
}

Result<Json> write_tensor(const TensorView& t, const fs::path& path) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(t.data), span(t) * dtype_bytes(t.dtype));
  file.close();
  if (!file) return Status(StatusCode::kInternal, "cannot write " + path.string());
  Json described = describe_tensor(t);
  described["file"] = path.string();
  return described;
}

Status read_tensor(const fs::path& path, const TensorView& t) {
  const int64_t bytes = dtype_bytes(t.dtype);
  std::array<int64_t, 4> sizes{1, 1, 1, 1}, strides{};
  for (size_t i = 0, rank = static_cast<size_t>(t.rank); i < rank; ++i) {
    sizes[4 - rank + i] = t.sizes[i];
    strides[4 - rank + i] = t.strides[i];
  }
  std::ifstream file(path, std::ios::binary);
  for (int64_t a = 0; a < sizes[0]; ++a) {
    for (int64_t b = 0; b < sizes[1]; ++b) {
      for (int64_t c = 0; c < sizes[2]; ++c) {
        const int64_t at = a * strides[0] + b * strides[1] + c * strides[2];
        file.read(static_cast<char*>(t.data) + at * bytes, sizes[3] * bytes);
      }
    }
  }
  if (!file) return {StatusCode::kInternal, "cannot read " + path.string()};
  return {};
}

}  // namespace fovea::cli
