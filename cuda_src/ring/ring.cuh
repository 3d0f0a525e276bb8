// ring.cuh -- a warp's ring of rows in shared memory, filled by the copy engine
//
// WarpRing has a warp's parts of the rows of the next `stages` turns. Each warp fills its own slots
// and waits for no other warp.
#pragma once
#include "ring_shape.cuh"

// Held: the element types of the tensors that pass through the ring.
template <Tile tile, class... Held>
struct WarpRing {
  using Shape = RingShape<tile>;
  static constexpr int slot_bytes = (RingOffset<tile, Held>::part_bytes + ...);
  static constexpr int ring_bytes = tile.stages * slot_bytes;
  static constexpr int num_rings = tile.block_size() / 32;
  static constexpr int smem_bytes =
      num_rings * (ring_bytes + tile.stages * sizeof(unsigned long long));

  // A slot, and how many times the ring has been filled.
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
    barriers =
        reinterpret_cast<unsigned long long*>(smem + num_rings * ring_bytes) + warp * tile.stages;
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < tile.stages; ++slot) bulk_barrier_init(barriers + slot, 1);
    }
    __syncwarp();
  }

  // Called by one lane: starts the copy of the next row to a slot.
  __device__ __forceinline__ void fetch(int slot, int num_cols,
                                        RingStream<tile, Held>&... streams) const {
    if (num_cols == 0) return;
    bulk_expect(barriers + slot,
                (RingOffset<tile, Held>::fetched_bytes(streams.to_fetch, num_cols) + ...));
    unsigned char* to = slots + slot * slot_bytes;
    ((bulk_copy(to, RingOffset<tile, Held>::fetched_from(streams.to_fetch),
                RingOffset<tile, Held>::fetched_bytes(streams.to_fetch, num_cols), barriers + slot),
      to += RingOffset<tile, Held>::part_bytes, streams.to_fetch += streams.step),
     ...);
  }
  __device__ __forceinline__ void wait(Position of, int num_cols) const {
    if (num_cols > 0) bulk_wait(barriers + of.slot, of.round);
  }
};

// Called when the barriers of WarpRing, Exchange and Broadcast (exchange.cuh) are made.
template <Tile tile>
__device__ __forceinline__ void ring_sync() {
  if constexpr (tile.cluster_size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}
