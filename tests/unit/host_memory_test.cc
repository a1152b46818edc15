// Memory for workspaces: aligned, writable to its last byte, and refused as a value.
#include "fovea/host_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>

// Sanitizers would end the program where memory is refused: here they are to answer as the system
// does.
extern "C" const char* __asan_default_options();
extern "C" const char* __tsan_default_options();
const char* __asan_default_options() { return "allocator_may_return_null=1"; }
const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace fovea {
namespace {

TEST(HostMemoryTest, IsAlignedAndWritable) {
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{1} << 20, (size_t{2} << 20) - 1,
                             size_t{2} << 20, (size_t{7} << 20) + 13}) {
    const Result<HostMemory> memory = HostMemory::allocate(bytes);
    ASSERT_TRUE(memory.ok()) << memory.status().message();
    EXPECT_EQ(memory->bytes(), bytes);
    EXPECT_EQ(memory->workspace().data, memory->data());
    EXPECT_EQ(memory->workspace().bytes, bytes);
    const size_t alignment = bytes < size_t{2} << 20 ? kWorkspaceAlignment : size_t{2} << 20;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % alignment, 0u) << bytes;
    std::memset(memory->data(), 0x5A, bytes);
  }
}

TEST(HostMemoryTest, NoBytesAreNoMemory) {
  const Result<HostMemory> memory = HostMemory::allocate(0);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(memory->data(), nullptr);
  EXPECT_EQ(memory->workspace().bytes, 0u);
}

TEST(HostMemoryTest, TooMuchIsRefused) {
  const Result<HostMemory> memory = HostMemory::allocate(SIZE_MAX / 2);
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.status().code(), StatusCode::kOutOfMemory);
  EXPECT_NE(memory.status().message().find(std::to_string(SIZE_MAX / 2)), std::string::npos);
}

TEST(HostMemoryTest, ReleasedMemoryIsTheCallers) {
  Result<HostMemory> memory = HostMemory::allocate(size_t{4} << 20);
  ASSERT_TRUE(memory.ok());
  void* const data = memory->data();
  HostMemory moved = std::move(*memory);
  EXPECT_EQ(memory->bytes(), 0u);
  void* const released = moved.release();
  EXPECT_EQ(released, data);
  EXPECT_EQ(moved.data(), nullptr);
  EXPECT_EQ(moved.bytes(), 0u);
  std::free(released);
}

}  // namespace
}  // namespace fovea
