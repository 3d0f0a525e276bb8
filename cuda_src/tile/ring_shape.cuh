// ring_shape.cuh -- where the parts of a row are, in memory and in a slot of a ring
//
// A block works on rows_per_block rows at a time and owns a slice of their columns. Each of the
// warps that share a row owns a part of the slice: packs_per_thread packs of 32 lanes, side by
// side.
//
// RingShape    which row, slice and part a thread works on
// RingPart     a part of one tensor: where it begins in its slot, and what the copy engine fetches
#pragma once
#include "bulk.cuh"
#include "cluster.cuh"
#include "register_cols.cuh"

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
