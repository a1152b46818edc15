// Raw files of tensors.
#include "cli/peer_tensors.h"

#include <fstream>
#include <nlohmann/json.hpp>

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

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
  std::ifstream file(path, std::ios::binary);
  for (int64_t b = 0; b < t.sizes[0]; ++b) {
    for (int64_t i = 0; i < t.sizes[1]; ++i) {
      for (int64_t h = 0; h < t.sizes[2]; ++h) {
        const int64_t at = b * t.strides[0] + i * t.strides[1] + h * t.strides[2];
        file.read(static_cast<char*>(t.data) + at * bytes, t.sizes[3] * bytes);
      }
    }
  }
  if (!file) return {StatusCode::kInternal, "cannot read " + path.string()};
  return {};
}

}  // namespace fovea::cli
