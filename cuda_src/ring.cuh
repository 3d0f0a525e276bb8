// ring.cuh -- rows on their way through shared memory, and sums that cross a block or cluster without stopping it
//
// A block owns a slice of the columns, each of its warps a part of the slice: packs_per_thread packs of 32 lanes, side by side.
// Turns    the rows that a block or cluster takes one after the other: neighbouring clusters take neighbouring rows
// WarpRing the warp's part of the rows of the next `stages` turns. A warp has the copy engine fill its own ring: it waits for
//          no other warp.
// Exchange two floats of every warp that shares the row, sent to all of them. They are read a turn later than they are sent,
// and
//          have arrived by then. Four buffers, since the fastest warp is at most three turns ahead of the slowest.
#pragma once
#include "bulk.cuh"
#include "reduce.cuh"
#include "row.cuh"

template <Tile tile>
struct RingShape {
  static_assert(tile.stages == 0 || tile.stages >= 2,
                "a row is used for the last time a turn after the next one is waited for");
  static constexpr int num_warps = tile.threads_per_row / 32;
  static constexpr int part_cols = tile.pack_size * 32 * tile.packs_per_thread;

  // The columns of this warp.
  __device__ __forceinline__ static Slice part(int num_cols) {
    const Slice block = slice<tile>(num_cols, tile.cluster_size > 1 ? cluster_rank() : 0);
    const int first = min(block.first_col + static_cast<int>(threadIdx.x) / 32 * part_cols, block.last_col);
    return {first, min(first + part_cols, block.last_col)};
  }
  // How many columns warp `source` of those that share the row has.
  __device__ __forceinline__ static int source_cols(int source, int num_cols) {
    if constexpr (tile.exact) return part_cols;
    const int left = slice<tile>(num_cols, source / num_warps).size() - source % num_warps * part_cols;
    return min(max(left, 0), part_cols);
  }
  // Where pack `pack` of this lane begins in its part.
  __device__ __forceinline__ static int col(int pack) {
    return (pack * 32 + static_cast<int>(threadIdx.x) % 32) * tile.pack_size;
  }
  __device__ __forceinline__ static bool in_part(int pack, Slice part) { return tile.exact || col(pack) < part.size(); }
};

template <Tile tile>
struct Turns {
  long long first_row, step;
  unsigned count;

  __device__ __forceinline__ explicit Turns(long long num_rows)
      : first_row(blockIdx.x / tile.cluster_size), step(gridDim.x / tile.cluster_size) {
    count = static_cast<unsigned>((num_rows - first_row + step - 1) / step);
  }
  __device__ __forceinline__ long long row(unsigned turn) const { return first_row + turn * step; }
};

// Held: the types of the tensors that pass through the ring.
template <Tile tile, class... Held>
struct WarpRing {
  using Shape = RingShape<tile>;
  static constexpr int slot_bytes = Shape::part_cols * (sizeof(Held) + ...);
  static constexpr int ring_bytes = tile.stages * slot_bytes;
  static constexpr int smem_bytes = Shape::num_warps * (ring_bytes + tile.stages * sizeof(unsigned long long));

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
    barriers = reinterpret_cast<unsigned long long*>(smem + Shape::num_warps * ring_bytes) + warp * tile.stages;
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < tile.stages; ++slot) bulk_barrier_init(barriers + slot, 1);
    }
    __syncwarp();
  }

  // One lane: has a slot filled. starts: where the warp's part of each tensor's row begins.
  __device__ __forceinline__ void fetch(int slot, int num_cols, const Held*... starts) const {
    if (num_cols == 0) return;
    bulk_expect(barriers + slot, static_cast<unsigned>(num_cols) * static_cast<unsigned>((sizeof(Held) + ...)));
    unsigned char* to = slots + slot * slot_bytes;
    ((bulk_copy(to, starts, num_cols * static_cast<unsigned>(sizeof(Held)), barriers + slot),
      to += Shape::part_cols * sizeof(Held)),
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

template <Tile tile>
struct Exchange {
  static constexpr int num_warps = RingShape<tile>::num_warps;
  static constexpr int num_sources = num_warps * tile.cluster_size;
  static constexpr int num_buffers = 4;
  static constexpr int smem_bytes = num_buffers * (2 * num_sources * sizeof(float) + sizeof(unsigned long long));

  unsigned long long* barriers;
  float* buffers;  // [num_buffers][2][num_sources]

  // The caller synchronises the block, and the cluster, before the first send.
  __device__ __forceinline__ explicit Exchange(unsigned char* smem)
      : barriers(reinterpret_cast<unsigned long long*>(smem)), buffers(reinterpret_cast<float*>(barriers + num_buffers)) {
    if (threadIdx.x == 0) {
      for (int buffer = 0; buffer < num_buffers; ++buffer) {
        bulk_barrier_init(barriers + buffer, tile.cluster_size > 1 ? 1 : 2 * num_warps);
        expect(buffer);
      }
    }
  }

  // All lanes of a warp, each half with the value it speaks for.
  __device__ __forceinline__ void send(unsigned turn, float value) const {
    const int buffer = turn % num_buffers;
    const unsigned lane = threadIdx.x % 16;
    float* at = buffers + (2 * buffer + speaks_for_second()) * num_sources + threadIdx.x / 32;
    if constexpr (tile.cluster_size > 1) {
      if (lane < tile.cluster_size) cluster_send(at + cluster_rank() * num_warps, value, barriers + buffer, lane);
    } else if (lane == 0) {
      *at = value;
      bulk_arrive(barriers + buffer);
    }
  }

  __device__ __forceinline__ void wait(unsigned turn) const {
    bulk_wait(barriers + turn % num_buffers, turn / num_buffers);
    // In time: nobody sends for turn + 4 before this thread has sent for turn + 2.
    if (threadIdx.x == 0) expect(turn % num_buffers);
  }

  // f(source, value) for what the warps sent, of the value this half speaks for (or of `second`); its 16 lanes share the
  // sources out.
  template <class F>
  __device__ __forceinline__ void for_each_source(unsigned turn, bool second, F f) const {
    const float* received = buffers + (2 * (turn % num_buffers) + second) * num_sources;
#pragma unroll
    for (int first = 0; first < num_sources; first += 16) {
      const int source = first + threadIdx.x % 16;
      if (num_sources % 16 == 0 || source < num_sources) f(source, received[source]);
    }
  }

 private:
  __device__ __forceinline__ void expect(int buffer) const {
    if constexpr (tile.cluster_size > 1) bulk_expect(barriers + buffer, 2 * num_sources * static_cast<unsigned>(sizeof(float)));
  }
};

// After the barriers of WarpRing and Exchange were made.
template <Tile tile>
__device__ __forceinline__ void ring_sync() {
  if constexpr (tile.cluster_size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}
