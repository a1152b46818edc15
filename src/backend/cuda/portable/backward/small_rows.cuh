// The query rows that a block of keys of small heads visits, and their way to shared memory: found
// by flights, so that from a tile to the next there is nothing to find.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/backward/ladder.cuh"

namespace fovea::cuda {

// Tiles of query rows one after another that are alike: of one head, whole, and either all of rows
// that see every key or none; or one tile that is not whole. Where its rows begin is in values from
// the tensors' first.
struct Flight {
  Rung first;
  int count;
  bool whole;  // and vectors bring its rows and what is known of them
  int64_t q, dout, stats;
};

struct SmallPlace : KeyPlace {
  int2 clear;  // rows of every head that see all keys
  Flight flights[4];
};

template <typename Shape>
class SmallRows {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = Shape::kOnePass;
  static constexpr int kDim = kC.dim_qk, kTileQ = kC.key_tile_q, kThreads = kC.key_threads();
  using Steps = Ladder<kC.key_tile(), kTileQ>;

 public:
  using TileQ = tile::SharedTile<T, kTileQ, kDim>;
  // A stage: Q, dO, lse2, delta, and what each row sees, of tiles of which something is hidden.
  static constexpr int kDout = TileQ::kBytes, kLse2 = 2 * kDout, kDelta = kLse2 + kTileQ * 4;
  static constexpr int kSights = kDelta + kTileQ * 4, kStageBytes = kSights + kTileQ * 8;
  static_assert(kStageBytes % 128 == 0);

  __device__ __forceinline__ SmallRows(const BackwardArguments& a, SmallPlace& place,
                                       uint32_t shared)
      : a_(a), place_(place), shared_(shared) {}

  __device__ __forceinline__ Flight flight_from(const SmallPlace& place, int tile) const {
    Flight flight;
    const Rung rung = Steps::rung_from(a_.p, place, tile);
    const Sequence& s = place.s;
    const int head = place.head_kv * a_.p.group + rung.first.head;
    const auto first = [&](const Rows& t) {
      return s.batch_at * t.batch + (s.q_row + rung.first.i) * t.row + head * t.head;
    };
    flight.first = rung;
    flight.q = first(a_.q);
    flight.dout = first(a_.dout);
    flight.stats = stat_index(a_, s, head, rung.first.i);
    const auto aligned = [](const float* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
    flight.whole = rung.one_head && a_.vector_q && a_.vector_dout && a_.p.dim_qk == kDim &&
                   a_.p.dim_v == kDim && aligned(a_.lse2 + flight.stats) &&
                   aligned(a_.delta + flight.stats);
    flight.count = flight.whole ? like(place, rung) : 1;
    return flight;
  }
  // Called by one thread, a flight ahead of the others.
  __device__ __forceinline__ void find_flight(uint32_t n) {
    const Flight& before = place_.flights[(n - 1) % 4];
    place_.flights[n % 4] = flight_from(place_, before.first.tile + before.count);
  }

  // The tile to be loaded, and this thread's share of it.
  struct Cursor {
    uint32_t flight;
    int tile, left;  // left: of the flight, after this one
    bool masked, whole;
    const T *q, *dout;
    const float* stats;
  };
  __device__ __forceinline__ void enter(Cursor& cursor, const Flight& flight, uint32_t n) const {
    cursor.flight = n;
    cursor.tile = flight.first.tile;
    cursor.left = flight.count - 1;
    cursor.masked = flight.first.masked;
    cursor.whole = flight.whole;
    const int row = threadIdx.x / TileQ::kChunks, col = threadIdx.x % TileQ::kChunks * 8;
    cursor.q = static_cast<const T*>(a_.q.data) + flight.q + row * a_.q.row + col;
    cursor.dout = static_cast<const T*>(a_.dout.data) + flight.dout + row * a_.dout.row + col;
    cursor.stats = (threadIdx.x < kTileQ / 4 ? a_.lse2 : a_.delta) + flight.stats +
                   threadIdx.x % (kTileQ / 4) * 4;
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    if (cursor.left > 0) {
      --cursor.left;
      ++cursor.tile;
      cursor.q += kTileQ * a_.q.row;
      cursor.dout += kTileQ * a_.dout.row;
      cursor.stats += kTileQ;
    } else {
      enter(cursor, place_.flights[(cursor.flight + 1) % 4], cursor.flight + 1);
    }
  }

  __device__ __forceinline__ void load_rows(const Cursor& cursor, int stage) const {
    const uint32_t to = shared_ + stage * kStageBytes;
    const Rung& rung = place_.flights[cursor.flight % 4].first;
    if (!cursor.whole) {
      load_any_rows(to, rung);
      return;
    }
    constexpr int kStep = kThreads / TileQ::kChunks;
    static_assert(kTileQ % kStep == 0 && kStep % 8 == 0);
    const uint32_t at = TileQ::offset(threadIdx.x / TileQ::kChunks, threadIdx.x % TileQ::kChunks);
#pragma unroll
    for (int r = 0; r < kTileQ; r += kStep) {
      ptx::cp_async_16(to + at + r * kDim * 2, cursor.q + r * a_.q.row);
      ptx::cp_async_16(to + at + r * kDim * 2 + kDout, cursor.dout + r * a_.dout.row);
    }
    if (threadIdx.x < kTileQ / 2) ptx::cp_async_16(to + kLse2 + threadIdx.x * 16, cursor.stats);
    if (cursor.masked) {
      const int first = rung.first.i + (cursor.tile - rung.tile) * kTileQ;
      for (int r = threadIdx.x; r < kTileQ; r += kThreads) {
        store_sight(to, r, sight_of(a_.p, place_.s, first + r));
      }
    }
  }

 private:
  // How many tiles from `rung` on are whole, of its head, and masked as it is.
  static __device__ __forceinline__ int like(const SmallPlace& place, const Rung& rung) {
    const auto tiles_to = [&](int end) { return (end - rung.first.i + kTileQ - 1) / kTileQ; };
    int count = min((place.s.q_len - rung.first.i) / kTileQ, place.tile_end - rung.tile);
    count = min(count, tiles_to(place.row + place.rows));
    if (!rung.masked) {
      count = min(count, (place.clear.y - rung.first.i) / kTileQ);
    } else if (rung.first.i < place.clear.x) {
      count = min(count, tiles_to(place.clear.x));
    }
    return max(count, 1);
  }

  // Rows of several heads, too few of them, or that vectors do not bring.
  __device__ __forceinline__ void load_any_rows(uint32_t to, const Rung& rung) const {
    const int rows = a_.p.group * place_.s.q_len - rung.tile * kTileQ;
    const RowSpan span = rung.span(kTileQ);
    load_queries<T, TileQ, kThreads>(to, a_.q, place_, a_.p.group, span, rows, a_.p.dim_qk,
                                     a_.vector_q);
    load_queries<T, TileQ, kThreads>(to + kDout, a_.dout, place_, a_.p.group, span, rows,
                                     a_.p.dim_v, a_.vector_dout);
    for (int r = threadIdx.x; r < kTileQ; r += kThreads) {
      if (r >= rows) {  // rows past the last: weights of zero
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + kLse2 + r * 4), "f"(kInfinity));
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + kDelta + r * 4), "f"(0.0f));
        store_sight(to, r, {-1, -1, 0});
        continue;
      }
      const Row which = span.of(place_.s, r);
      const int64_t from =
          stat_index(a_, place_.s, place_.head_kv * a_.p.group + which.head, which.i);
      ptx::cp_async_4(to + kLse2 + r * 4, a_.lse2 + from);
      ptx::cp_async_4(to + kDelta + r * 4, a_.delta + from);
      store_sight(to, r, sight_of(a_.p, place_.s, which.i));
    }
  }
  static __device__ __forceinline__ void store_sight(uint32_t to, int r, const Sight& sight) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + kSights + r * 8), "r"(sight.begin),
                 "r"(sight.end)
                 : "memory");
  }

  const BackwardArguments& a_;
  SmallPlace& place_;
  const uint32_t shared_;  // two stages
};

}  // namespace fovea::cuda
