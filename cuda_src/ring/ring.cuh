// ring.cuh -- a warp's ring of rows in shared memory, filled by the copy engine
//
// A block works on rows_per_block rows at a time and owns a slice of their columns. Each of the
// warps that share a row owns a part of the slice: packs_per_thread packs of 32 lanes, side by
// side. A ring has `stages` slots: a warp's parts of the rows of its next turns. Each warp fills
// its own slots and waits for no other warp.
//
// RingShape     which row, slice and part a thread works on
// RingPart      a part of one tensor: where it begins in its slot, and what the copy engine fetches
// RingStream    a tensor whose rows pass through the ring
// WarpRing      the slots of a warp, and the copies to them
#pragma once
#include "bulk.cuh"
#include "threads.cuh"
#include "tile.cuh"

template <Tile tile>
struct RingShape {
  static constexpr int num_warps = tile.threads_per_row / 32;  // that share a row
  static constexpr int part_cols = tile.pack_size * 32 * tile.packs_per_thread;

  // Which of the block's rows this thread works on, and its index among the threads that share the
  // row.
  __device__ __forceinline__ static int group() {
    return tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) / tile.threads_per_row : 0;
  }
  __device__ __forceinline__ static int thread() {
    return tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) % tile.threads_per_row
                                   : static_cast<int>(threadIdx.x);
  }

  // The columns of warp `source` of those that share the row.
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
  // Only a lane's last pack can lie beyond the part, because the parts have nearly the same size.
  __device__ __forceinline__ static bool in_part(int pack, Slice part) {
    return tile.exact || pack < tile.packs_per_thread - 1 || col(pack) < part.size();
  }
};

// The copy engine moves units of 16 bytes. Rows whose packs have fewer bytes may begin anywhere:
// then it fetches the units that hold the part, and the part begins at an offset in the first one.
template <Tile tile, class T>
struct RingPart {
  static constexpr bool aligned = tile.pack_size * sizeof(T) >= 16;
  static constexpr int most_bytes = RingShape<tile>::part_cols * sizeof(T) + (aligned ? 0 : 32);

  __device__ __forceinline__ static unsigned offset(const T* start) {
    return aligned ? 0 : static_cast<unsigned>(reinterpret_cast<unsigned long long>(start) % 16);
  }
  // What is fetched: how many bytes, and from where.
  __device__ __forceinline__ static unsigned fetched_bytes(const T* start, int num_cols) {
    const unsigned bytes = static_cast<unsigned>(num_cols) * static_cast<unsigned>(sizeof(T));
    return aligned ? bytes : (offset(start) + bytes + 15) / 16 * 16;
  }
  __device__ __forceinline__ static const void* fetched_from(const T* start) {
    if constexpr (aligned) return start;
    return reinterpret_cast<const void*>(reinterpret_cast<unsigned long long>(start) / 16 * 16);
  }
};

template <class T>
struct RingStream {
  const T* to_fetch;  // the warp's part of the row that is fetched next
  long long step;     // elements from there to the row after it
};

// Held: the element types of the tensors. A slot has a part of each, one behind the other.
template <Tile tile, class... Held>
struct WarpRing {
  static constexpr int num_streams = sizeof...(Held);
  static constexpr int slot_bytes = (RingPart<tile, Held>::most_bytes + ...);
  static constexpr int ring_bytes = tile.stages * slot_bytes;
  static constexpr int num_rings = tile.block_size() / 32;
  static constexpr int smem_bytes =
      num_rings * (ring_bytes + tile.stages * sizeof(unsigned long long));

  // One row on its way through the ring.
  struct Position {
    int slot = 0;
    unsigned round = 0;             // how many times the ring was filled before
    unsigned offsets[num_streams];  // of each tensor's part (RingPart)
    unsigned steps[num_streams];    // from this row's offset to the next row's

    __device__ __forceinline__ void advance() {
      if (++slot == tile.stages) {
        slot = 0;
        ++round;
      }
#pragma unroll
      for (int at = 0; at < num_streams; ++at) offsets[at] = (offsets[at] + steps[at]) % 16;
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

  // The first row. Called before it is fetched.
  __device__ __forceinline__ static Position first(const RingStream<Held>&... streams) {
    return {0,
            0,
            {RingPart<tile, Held>::offset(streams.to_fetch)...},
            {static_cast<unsigned>(streams.step * sizeof(Held)) % 16 ...}};
  }
  // Called by one lane: starts the copy of the next row to a slot.
  __device__ __forceinline__ void fetch(int slot, int num_cols,
                                        RingStream<Held>&... streams) const {
    if (num_cols == 0) return;
    bulk_expect(barriers + slot,
                (RingPart<tile, Held>::fetched_bytes(streams.to_fetch, num_cols) + ...));
    unsigned char* to = slots + slot * slot_bytes;
    ((bulk_copy(to, RingPart<tile, Held>::fetched_from(streams.to_fetch),
                RingPart<tile, Held>::fetched_bytes(streams.to_fetch, num_cols), barriers + slot),
      to += RingPart<tile, Held>::most_bytes, streams.to_fetch += streams.step),
     ...);
  }
  __device__ __forceinline__ void wait(const Position& of, int num_cols) const {
    if (num_cols > 0) bulk_wait(barriers + of.slot, of.round);
  }
  // The part of tensor `stream`, whose elements are T. bytes_before: of the tensors before it.
  template <int stream, class T>
  __device__ __forceinline__ const T* part(const Position& of, int bytes_before) const {
    const unsigned char* place = slots + of.slot * slot_bytes + bytes_before;
    return reinterpret_cast<const T*>(RingPart<tile, T>::aligned ? place
                                                                 : place + of.offsets[stream]);
  }
};

// Called by all lanes: starts the copies of a warp's first rows.
template <Tile tile, class Streams>
__device__ __forceinline__ void fetch_first(Streams& streams, unsigned num_turns) {
  if (threadIdx.x % 32 != 0) return;
  for (int slot = 0; slot < min(static_cast<unsigned>(tile.stages), num_turns); ++slot)
    streams.fetch(slot);
}

// Called when the barriers of WarpRing, Exchange and Broadcast (exchange.cuh) are made.
template <Tile tile>
__device__ __forceinline__ void ring_sync() {
  if constexpr (tile.cluster_size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}
