// Memory on large pages, for who asks for enough of it.
#include "fovea/host_memory.h"

#include <cstdlib>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fovea {
namespace {

// Of x86-64, and of Arm with pages of 4 KiB. Where they are larger, so are large pages, and these
// bytes are merely well aligned.
constexpr size_t kLargePage = size_t{2} << 20;

}  // namespace

void* HostMemory::release() {
  bytes_ = 0;
  return data_.release();
}

Result<HostMemory> HostMemory::allocate(size_t bytes) {
  HostMemory made;
  if (bytes == 0) return made;
  const bool large = bytes >= kLargePage;
  void* memory = nullptr;
  if (::posix_memalign(&memory, large ? kLargePage : kWorkspaceAlignment, bytes) != 0) {
    return Status{StatusCode::kOutOfMemory,
                  "HostMemory::allocate: " + std::to_string(bytes) + " bytes could not be had"};
  }
#ifdef MADV_HUGEPAGE
  // A wish: where it is refused, the memory lies on pages as they are.
  if (large) static_cast<void>(::madvise(memory, bytes, MADV_HUGEPAGE));
#endif
  made.data_.reset(memory);
  made.bytes_ = bytes;
  return made;
}

}  // namespace fovea
