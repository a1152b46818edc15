// Where a layer's own tensors lie.
#include "layers/memory.h"

#include <gtest/gtest.h>

namespace fovea::layers {
namespace {

TEST(LayerMemory, ATensorThatWasNotMadeIsNotGiven) {
  MemoryPlan plan(LayerUse::kInference);
  const Slot made = plan.forward(DType::kF32, {2, 3});
  const Slot gradient = plan.backward(DType::kF32, {2, 3});
  std::byte room[64];
  Memory at;
  at.forward = room;
  EXPECT_EQ(at.at(made).data, room);
  EXPECT_FALSE(at.at(gradient).given());
}

}  // namespace
}  // namespace fovea::layers
