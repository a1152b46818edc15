// Work that comes in strips, each of which has to be prepared before its parts can be done.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea {

struct StripSize {
  int64_t pieces = 0;  // of its preparation
  int64_t parts = 0;
  int64_t at_once = 1;  // parts that are best done together
};

struct StripWork {
  void* context = nullptr;
  StripSize (*size)(void* context, int64_t strip) = nullptr;
  void (*prepare)(void* context, int64_t strip, int64_t piece, int worker) = nullptr;
  void (*parts)(void* context, int64_t strip, int64_t begin, int64_t end, int worker) = nullptr;
};

constexpr size_t kStripBytes = 64;  // of memory for each strip, aligned to that

// Does all parts of all strips on up to `threads` threads, numbered as by parallel_for. Who takes a
// strip prepares it and goes on with its parts, for what was prepared is in the caches of that
// core; who finds no strip left helps others with theirs. Of a strip's last parts fewer are done at
// once, so that all end together. A worker's first strips are the same in every call.
void parallel_strips(int64_t strips, int threads, std::byte* memory, const StripWork& work);

template <typename Size, typename Prepare, typename Parts>
void parallel_strips(int64_t strips, int threads, std::byte* memory, Size size, Prepare prepare,
                     Parts parts) {
  struct All {
    Size size;
    Prepare prepare;
    Parts parts;
  } all{size, prepare, parts};
  StripWork work;
  work.context = &all;
  work.size = [](void* x, int64_t strip) { return static_cast<All*>(x)->size(strip); };
  work.prepare = [](void* x, int64_t strip, int64_t piece, int worker) {
    static_cast<All*>(x)->prepare(strip, piece, worker);
  };
  work.parts = [](void* x, int64_t strip, int64_t begin, int64_t end, int worker) {
    static_cast<All*>(x)->parts(strip, begin, end, worker);
  };
  parallel_strips(strips, threads, memory, work);
}

}  // namespace fovea
