// The angles of all positions of a layer, shared by the plans that have the same: those of a
// layer's other lengths.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "layers/cpu/kernels.h"

namespace fovea::layers::cpu {

using RopeTable = std::shared_ptr<const std::vector<std::byte>>;

// cos and sin of `rotation.positions` positions in a real type of so many bytes; `fill` makes what
// no plan has yet.
RopeTable rope_table(const Rotation& rotation, size_t real_bytes,
                     void (*fill)(const Rotation&, void* table));

}  // namespace fovea::layers::cpu
