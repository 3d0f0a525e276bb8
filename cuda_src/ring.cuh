// ring.cuh -- rows on their way through shared memory, and sums that cross a block or cluster without stopping it
//
// A block works on rows_per_block rows at a time. It owns a slice of their columns, each of the warps that share a row a part
// of the slice: packs_per_thread packs of 32 lanes, side by side.
//
// RingStream  one tensor that passes through the ring
// WarpRing  the warp's part of the rows of the next `stages` turns; each warp has the copy engine fill its own and waits for
//           no other
// Exchange  one to three floats of every warp that shares the row, sent to all of them and read a turn later, when they have
//           arrived. Four buffers: the fastest warp is at most three turns ahead of the slowest.
// Notice    four floats that one warp has found of a row, for all of its block. Two buffers: what it finds is of what all have
//           sent, and they send that of a turn after they have read the notice of the turn before last.
#pragma once
#include "bulk.cuh"
#include "reduce.cuh"
#include "row.cuh"

template <Tile tile>
struct RingShape {
  static constexpr int num_warps = tile.threads_per_row / 32;  // that share a row
  static constexpr int part_cols = tile.pack_size * 32 * tile.packs_per_thread;

  // Which of the block's rows this thread works on, and its index among those that share it.
  __device__ __forceinline__ static int group() {
    return tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) / tile.threads_per_row : 0;
  }
  __device__ __forceinline__ static int thread() {
    return tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) % tile.threads_per_row : static_cast<int>(threadIdx.x);
  }

  // The columns of warp `source` of those that share the row, and of this warp.
  __device__ __forceinline__ static Slice part_of(int source, int num_cols) {
    constexpr int step = tile.pack_size * (tile.pack_size > 1 ? 8 : 1);
    return share_of<num_warps, step>(slice<tile>(num_cols, source / num_warps), source % num_warps);
  }
  // Which of those warps this is.
  __device__ __forceinline__ static int source() {
    return (tile.cluster_size > 1 ? cluster_rank() * num_warps : 0) + thread() / 32;
  }
  __device__ __forceinline__ static Slice part(int num_cols) { return part_of(source(), num_cols); }
  // Where pack `pack` of this lane begins in its part.
  __device__ __forceinline__ static int col(int pack) {
    return (pack * 32 + static_cast<int>(threadIdx.x) % 32) * tile.pack_size;
  }
  // Only a lane's last pack can lie beyond the part: parts are as even as they come.
  __device__ __forceinline__ static bool in_part(int pack, Slice part) {
    return tile.exact || pack < tile.packs_per_thread - 1 || col(pack) < part.size();
  }
};

// Rows whose packs have less than 16 bytes need not begin on 16 bytes, as the copy engine wants it: it then fetches from the 16
// bytes in which the part begins to those in which it ends, and the part lies that much off the slot's start.
template <Tile tile, class T>
struct RingOffset {
  static constexpr bool aligned = tile.pack_size * sizeof(T) >= 16;
  static constexpr int part_bytes = RingShape<tile>::part_cols * sizeof(T) + (aligned ? 0 : 32);

  unsigned bytes, step;

  __device__ __forceinline__ RingOffset() = default;
  // start: where the part of the first turn's row begins; step: elements from turn to turn
  __device__ __forceinline__ RingOffset(const T* start, long long step)
      : bytes(reinterpret_cast<unsigned long long>(start) % 16), step(static_cast<unsigned>(step * sizeof(T)) % 16) {}

  __device__ __forceinline__ const T* in(const unsigned char* part) const {
    return reinterpret_cast<const T*>(aligned ? part : part + bytes);
  }
  __device__ __forceinline__ void advance() { bytes = (bytes + step) % 16; }

  // From where, and how many bytes, the copy engine fetches.
  __device__ __forceinline__ static unsigned fetched_bytes(const T* start, int num_cols) {
    const unsigned bytes = static_cast<unsigned>(num_cols) * static_cast<unsigned>(sizeof(T));
    if constexpr (aligned) return bytes;
    return (static_cast<unsigned>(reinterpret_cast<unsigned long long>(start) % 16) + bytes + 15) / 16 * 16;
  }
  __device__ __forceinline__ static const void* fetched_from(const T* start) {
    if constexpr (aligned) return start;
    return reinterpret_cast<const void*>(reinterpret_cast<unsigned long long>(start) / 16 * 16);
  }
};

// A tensor that passes through the ring: where the warp's part of it is, in memory and in a slot, turn after turn.
template <Tile tile, class T>
struct RingStream {
  const T* to_fetch;
  long long step;
  RingOffset<tile, T> ahead, at;  // of the row that is summed up, and a turn later of the row that is written

  __device__ __forceinline__ RingStream() = default;
  // start: of the part in the first turn's row; step: elements from turn to turn
  __device__ __forceinline__ RingStream(const T* start, long long step)
      : to_fetch(start), step(step), ahead(start, step), at(ahead) {}

  __device__ __forceinline__ const T* in(const unsigned char* part, bool is_ahead) const {
    return is_ahead ? ahead.in(part) : at.in(part);
  }
};

// Held: the types of the tensors that pass through the ring.
template <Tile tile, class... Held>
struct WarpRing {
  using Shape = RingShape<tile>;
  static constexpr int slot_bytes = (RingOffset<tile, Held>::part_bytes + ...);
  static constexpr int ring_bytes = tile.stages * slot_bytes;
  static constexpr int num_rings = tile.block_size() / 32;
  static constexpr int smem_bytes = num_rings * (ring_bytes + tile.stages * sizeof(unsigned long long));

  // Which slot, and how often the ring has gone round.
  struct Position {
    int slot = 0;
    unsigned round = 0;

    __device__ __forceinline__ void advance() {
      if (++slot == tile.stages) {
        slot = 0;
        ++round;
      }
    }
  };

  unsigned char* slots;          // of this warp
  unsigned long long* barriers;  // one a slot

  __device__ __forceinline__ explicit WarpRing(unsigned char* smem) {
    const int warp = threadIdx.x / 32;
    slots = smem + warp * ring_bytes;
    barriers = reinterpret_cast<unsigned long long*>(smem + num_rings * ring_bytes) + warp * tile.stages;
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < tile.stages; ++slot) bulk_barrier_init(barriers + slot, 1);
    }
    __syncwarp();
  }

  // One lane: has a slot filled with the next row.
  __device__ __forceinline__ void fetch(int slot, int num_cols, RingStream<tile, Held>&... streams) const {
    if (num_cols == 0) return;
    bulk_expect(barriers + slot, (RingOffset<tile, Held>::fetched_bytes(streams.to_fetch, num_cols) + ...));
    unsigned char* to = slots + slot * slot_bytes;
    ((bulk_copy(to, RingOffset<tile, Held>::fetched_from(streams.to_fetch),
                RingOffset<tile, Held>::fetched_bytes(streams.to_fetch, num_cols), barriers + slot),
      to += RingOffset<tile, Held>::part_bytes, streams.to_fetch += streams.step),
     ...);
  }
  __device__ __forceinline__ void wait(Position at, int num_cols) const {
    if (num_cols > 0) bulk_wait(barriers + at.slot, at.round);
  }
};

// Lanes 0 to 15 speak for the first of two values, lanes 16 to 31 for the second.
__device__ __forceinline__ bool speaks_for_second() { return threadIdx.x & 16; }

// Two sums over a warp for one shuffle more than one takes: each half of the lanes gets the sum it speaks for.
__device__ __forceinline__ float warp_reduce_two(float first, float second) {
  const float given = speaks_for_second() ? first : second;
  const float kept = speaks_for_second() ? second : first;
  return warp_reduce<16>(Sum<float, 1>{{kept + __shfl_xor_sync(0xffffffffu, given, 16)}}).part[0];
}
// What the two halves hold, to all lanes.
__device__ __forceinline__ Sum<float, 2> both_halves(float spoken_for) {
  return {{__shfl_sync(0xffffffffu, spoken_for, 0), __shfl_sync(0xffffffffu, spoken_for, 16)}};
}

template <Tile tile, int num_values = 2>
struct Exchange {
  static constexpr int num_warps = RingShape<tile>::num_warps;
  static constexpr int num_sources = num_warps * tile.cluster_size;
  static constexpr int num_buffers = 4;
  static constexpr int group_bytes = num_buffers * (num_values * num_sources * sizeof(float) + sizeof(unsigned long long));
  static constexpr int smem_bytes = tile.rows_per_block * group_bytes;

  unsigned long long* barriers;
  float* buffers;  // [num_buffers][num_values][num_sources]

  // The caller synchronises the block, and the cluster, before the first send.
  __device__ __forceinline__ explicit Exchange(unsigned char* smem)
      : barriers(reinterpret_cast<unsigned long long*>(smem + RingShape<tile>::group() * group_bytes)),
        buffers(reinterpret_cast<float*>(barriers + num_buffers)) {
    if (RingShape<tile>::thread() == 0) {
      for (int buffer = 0; buffer < num_buffers; ++buffer) {
        bulk_barrier_init(barriers + buffer, tile.threads_per_row + (tile.cluster_size > 1));
        expect(buffer);
      }
    }
  }

  // All lanes of a warp, each half with the value it speaks for. Every lane arrives, not only those that write, and in a
  // cluster too, where what is sent brings its own bytes: what it read of the turn before last comes before what others write
  // two turns from now (one lane for its warp, after a __syncwarp: up to 1% slower, and racecheck does not see the order).
  __device__ __forceinline__ void send(unsigned turn, float value) const {
    send_value(turn, speaks_for_second(), value);
    bulk_arrive(barriers + turn % num_buffers);
  }
  // One value, the same in all lanes.
  __device__ __forceinline__ void send_alone(unsigned turn, float value) const {
    static_assert(num_values == 1, "a wait ends when all values are there");
    if (!speaks_for_second()) send_value(turn, 0, value);
    bulk_arrive(barriers + turn % num_buffers);
  }
  // A third value, the same in all lanes; before send.
  __device__ __forceinline__ void send_third(unsigned turn, float value) const {
    if (!speaks_for_second()) send_value(turn, 2, value);
  }
  // expects: whether this thread prepares the barrier for what will be sent next; one of those that wait.
  __device__ __forceinline__ void wait(unsigned turn, bool expects) const {
    bulk_wait(barriers + turn % num_buffers, turn / num_buffers);
    // In time: nobody sends for turn + 4 before this thread has sent for turn + 2.
    if (expects) expect(turn % num_buffers);
  }

  // Neighbouring lanes share out the warps that have sent: number `index` of this lane is warp source(index). Of sums a lane
  // takes up to three before there are more lanes, up to the 16 of a half: an exchange between lanes takes longer than to add.
  static constexpr int lanes = num_values == 1 ? 32 : num_sources > 48 ? 16 : power_of_two_from((num_sources + 2) / 3);
  static constexpr int sources_per_lane = (num_sources + lanes - 1) / lanes;
  __device__ __forceinline__ static int source(int index) { return index * lanes + static_cast<int>(threadIdx.x) % lanes; }
  // f(index) for each of them, and what it sent: which = 0, 1, 2 for the first, second, third value.
  template <class F>
  __device__ __forceinline__ static void for_each_source(F f) {
#pragma unroll
    for (int index = 0; index < sources_per_lane; ++index) {
      if (num_sources % lanes == 0 || source(index) < num_sources) f(index);
    }
  }
  __device__ __forceinline__ float received(unsigned turn, int which, int index) const {
    return buffers[(num_values * static_cast<int>(turn % num_buffers) + which) * num_sources + source(index)];
  }

 private:
  __device__ __forceinline__ void send_value(unsigned turn, int which, float value) const {
    const int buffer = static_cast<int>(turn % num_buffers);
    const unsigned lane = threadIdx.x % 16;
    float* at = buffers + (num_values * buffer + which) * num_sources + RingShape<tile>::thread() / 32;
    if constexpr (tile.cluster_size > 1) {
      if (lane < tile.cluster_size) cluster_send(at + cluster_rank() * num_warps, value, barriers + buffer, lane);
    } else if (lane == 0) {
      *at = value;
    }
  }
  __device__ __forceinline__ void expect(int buffer) const {
    if constexpr (tile.cluster_size > 1) {
      bulk_expect(barriers + buffer, num_values * num_sources * static_cast<unsigned>(sizeof(float)));
    }
  }
};

template <Tile tile>
struct Notice {
  static constexpr int group_bytes = 2 * (sizeof(float4) + sizeof(unsigned long long));
  static constexpr int smem_bytes = tile.rows_per_block * group_bytes;

  float4* buffers;               // [2]
  unsigned long long* barriers;  // [2]

  // The caller synchronises the block before the first read. smem: 16-byte aligned
  __device__ __forceinline__ explicit Notice(unsigned char* smem)
      : buffers(reinterpret_cast<float4*>(smem + RingShape<tile>::group() * group_bytes)),
        barriers(reinterpret_cast<unsigned long long*>(buffers + 2)) {
    if (RingShape<tile>::thread() == 0) {
      bulk_barrier_init(barriers);
      bulk_barrier_init(barriers + 1);
    }
  }

  // One thread.
  __device__ __forceinline__ void give(unsigned turn, const float4& values) const {
    const int buffer = static_cast<int>(turn % 2);
    buffers[buffer] = values;
    bulk_arrive(barriers + buffer);
  }
  __device__ __forceinline__ float4 read(unsigned turn) const {
    const int buffer = static_cast<int>(turn % 2);
    bulk_wait(barriers + buffer, turn / 2);
    return buffers[buffer];
  }
};

// After the barriers of WarpRing, Exchange and Notice were made.
template <Tile tile>
__device__ __forceinline__ void ring_sync() {
  if constexpr (tile.cluster_size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}
