// Wrong requests are refused, with the argument's name, and nothing is written: random valid
// requests spoilt by one mutation each.
#include <gtest/gtest.h>

#include <map>

#include "fuzz/invalid_mutations.h"

namespace fovea::invalid {
namespace {

std::vector<Mutation> all_mutations() {
  std::vector<Mutation> all;
  for (const auto& group : {problem_mutations(), tensor_mutations(), value_mutations()}) {
    all.insert(all.end(), group.begin(), group.end());
  }
  return all;
}

TEST(FuzzInvalid, EveryMutationIsRefusedByName) {
  const std::vector<Mutation> mutations = all_mutations();
  std::map<std::string, uint64_t> applied;
  const uint64_t count = case_count(), first = first_seed();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Subject subject(seed);
    const Status before = subject.run();
    ASSERT_TRUE(before.ok()) << before.message() << "\nthe request itself; "
                             << reproduce(seed, "none");
    subject.arena.remember();

    // The first from a random one on that this subject can be spoilt by.
    std::string expected;
    const Mutation* mutation = nullptr;
    const auto start = static_cast<size_t>(subject.random.word() % mutations.size());
    for (size_t n = 0; expected.empty(); ++n) {
      mutation = &mutations[(start + n) % mutations.size()];
      expected = mutation->apply(subject);
    }
    ++applied[mutation->name];

    const Status after = subject.run();
    const std::string begins =
        std::string(mutation->spoils_problem ? "make_plan" : subject.call()) + ": " + expected;
    ASSERT_EQ(after.code(), StatusCode::kInvalidArgument) << after.message() << "\n"
                                                          << reproduce(seed, mutation->name);
    ASSERT_EQ(after.message().substr(0, begins.size()), begins) << after.message() << "\n"
                                                                << reproduce(seed, mutation->name);
    ASSERT_TRUE(subject.arena.unchanged())
        << "memory was written; " << reproduce(seed, mutation->name);
  }
  if (count < 5000) return;
  for (const Mutation& mutation : mutations) {
    EXPECT_GT(applied[mutation.name], 0u) << mutation.name << " never applied";
  }
}

}  // namespace
}  // namespace fovea::invalid
