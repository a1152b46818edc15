// Where a layer's own tensors lie.
#include "layers/memory.h"

#include <gtest/gtest.h>

#include <random>

#include "layers/cpu/rope_table.h"

namespace fovea::layers {
namespace {

constexpr int64_t kUnit = 256;

TEST(RopeTables, AreSharedByThoseWhoLive) {
  using cpu::RopeTable;
  int made = 0;
  static int* counter = nullptr;
  counter = &made;
  const auto table = [](int64_t positions, double base, size_t real_bytes) {
    cpu::Rotation rotation;
    rotation.turning = 8, rotation.positions = positions, rotation.base = base;
    return cpu::rope_table(rotation, real_bytes, [](const cpu::Rotation&, void*) { ++*counter; });
  };
  RopeTable one = table(100, 10000, 4), same = table(100, 10000, 4);
  EXPECT_EQ(one, same);
  EXPECT_EQ(one->size(), 100u * 8 * 4);
  EXPECT_EQ(made, 1);
  EXPECT_NE(table(101, 10000, 4), one);
  EXPECT_NE(table(100, 500, 4), one);
  EXPECT_NE(table(100, 10000, 8), one);
  EXPECT_EQ(made, 4);
  one.reset(), same.reset();
  one = table(100, 10000, 4);
  EXPECT_EQ(made, 5) << "nobody had it any more";
}

TEST(LayerMemory, ATensorThatWasNotMadeIsNotGiven) {
  MemoryPlan plan(LayerUse::kInference);
  const Slot made = plan.forward(DType::kF32, {2, 3});
  const Slot gradient = plan.backward(DType::kF32, {2, 3});
  plan.place();
  std::byte room[64];
  Memory at{&plan, {}};
  at.set(Room::kForward, room);
  EXPECT_EQ(at.at(made).data, room);
  EXPECT_FALSE(at.at(gradient).given());
}

TEST(LayerMemory, WhatNeverLivesAtOnceSharesItsPlace) {
  MemoryPlan plan(LayerUse::kTraining);
  plan.backward_bytes({3 * kUnit, {0, 1}});
  plan.backward_bytes({2 * kUnit, {2, 3}});
  plan.backward_bytes({kUnit, {3, 4}});
  plan.place();
  EXPECT_EQ(plan.bytes(Room::kBackward), static_cast<size_t>(3 * kUnit));
}

TEST(LayerMemory, AResultIsLentUntilItIsWritten) {
  MemoryPlan plan(LayerUse::kTraining);
  plan.lend(Room::kDquery, 4 * kUnit, 2);
  plan.lend(Room::kOut, 4 * kUnit, 2);
  const Slot before = plan.backward_bytes({3 * kUnit, {0, 1}});
  const Slot too_large = plan.backward_bytes({2 * kUnit, {1, 1}});
  const Slot too_late = plan.backward_bytes({kUnit, {1, 2}});
  plan.place();
  EXPECT_EQ(plan.bytes(Room::kBackward), static_cast<size_t>(3 * kUnit));
  EXPECT_EQ(plan.bytes(Room::kOut), 0u);
  std::vector<std::byte> workspace(3 * kUnit), dquery(4 * kUnit);
  Memory at{&plan, {}};
  at.set(Room::kBackward, workspace.data());
  at.set(Room::kDquery, dquery.data());
  EXPECT_EQ(at.at(before).data, dquery.data());
  EXPECT_EQ(at.at(too_large).data, workspace.data());
  EXPECT_EQ(at.at(too_late).data, workspace.data() + 2 * kUnit);
}

TEST(LayerMemory, WhatWasSavedIsSpentOnceItWasRead) {
  for (const bool spends : {false, true}) {
    MemoryPlan plan(LayerUse::kTraining);
    plan.saved(DType::kBool, {3 * kUnit}, {}, 1);
    plan.saved(DType::kBool, {kUnit}, {}, 3);
    const Slot early = plan.backward_bytes({kUnit, {1, 2}}),
               late = plan.backward_bytes({kUnit, {2, 2}});
    plan.place(spends);
    EXPECT_EQ(plan.bytes(Room::kSaved), static_cast<size_t>(4 * kUnit));
    EXPECT_EQ(plan.bytes(Room::kBackward), static_cast<size_t>((spends ? 1 : 2) * kUnit));
    std::vector<std::byte> workspace(2 * kUnit), saved(4 * kUnit);
    Memory at{&plan, {}};
    at.set(Room::kBackward, workspace.data());
    at.set(Room::kSaved, saved.data());
    EXPECT_EQ(at.at(early).data, workspace.data());
    EXPECT_EQ(at.at(late).data, spends ? saved.data() : workspace.data() + kUnit);
  }
}

// Whatever lives at once lies apart, and in memory that is there.
TEST(LayerMemory, NothingIsWrittenOver) {
  std::mt19937 random(3);
  const auto draw = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  for (int round = 0; round < 200; ++round) {
    MemoryPlan plan(LayerUse::kTraining);
    const int64_t lent = draw(30) * kUnit;
    const int until = draw(6);
    plan.lend(Room::kDquery, lent, until);
    struct One {
      Slot slot;
      Need need;
    };
    std::vector<One> all;
    for (int n = draw(6); n > 0; --n) {
      const Need need{static_cast<size_t>(draw(4000)), {0, draw(6)}};
      all.push_back(
          {plan.saved(DType::kBool, {static_cast<int64_t>(need.bytes)}, {}, need.life.last), need});
    }
    for (int n = draw(12); n >= 0; --n) {
      const int first = draw(6);
      const Need need{static_cast<size_t>(draw(4000)), {first, first + draw(6 - first)}};
      all.push_back({plan.backward_bytes(need), need});
    }
    plan.place(/*spends_saved=*/true);
    std::vector<std::byte> workspace(plan.bytes(Room::kBackward) + 1), dquery(lent + 1);
    std::vector<std::byte> saved(plan.bytes(Room::kSaved) + 1);
    Memory at{&plan, {}};
    at.set(Room::kBackward, workspace.data());
    at.set(Room::kDquery, dquery.data());
    at.set(Room::kSaved, saved.data());
    for (const One& one : all) {
      const Scratch a = at.scratch_at(one.slot);
      ASSERT_EQ(a.bytes, one.need.bytes);
      const auto in = [&](const std::vector<std::byte>& room) {
        return a.data >= room.data() && a.data + a.bytes <= &room.back();
      };
      EXPECT_TRUE(in(workspace) || in(saved) || (in(dquery) && one.need.life.last < until));
      for (const One& other : all) {
        const Scratch b = at.scratch_at(other.slot);
        if (&one == &other || !one.need.life.meets(other.need.life)) continue;
        EXPECT_TRUE(a.data + a.bytes <= b.data || b.data + b.bytes <= a.data);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::layers
