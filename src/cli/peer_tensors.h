// Tensors on their way to a peer's process and back: raw files, and a line of JSON that says what
// is in them.
#pragma once

#include <filesystem>

#include "cli/json.h"
#include "fovea/status.h"
#include "fovea/tensor.h"

namespace fovea::cli {

// {"dtype": "bf16", "sizes": [...], "strides": [...], "elements": 4096}, of the memory that a view
// spans, gaps included.
Json describe_tensor(const TensorView& tensor);

// The same with the "file" that its memory was written to.
Result<Json> write_tensor(const TensorView& tensor, const std::filesystem::path& path);

// Fills a view whose last stride is 1 from dense bytes.
Status read_tensor(const std::filesystem::path& path, const TensorView& tensor);

}  // namespace fovea::cli
