// register_packs.cuh -- the packs of a row in a thread's registers: how they are loaded and stored
#pragma once
#include "register_cols.cuh"
#include "tile.cuh"

template <class Load, Tile tile>
struct RegisterPacks {
  Pack<typename Load::Held, tile.pack_size> packs[tile.packs_per_thread];
  Slice cols;

  // Starts all loads before the first use, so that they are in flight together. A pack beyond the
  // row loads the first pack again.
  __device__ __forceinline__ void fetch(const Load& load, long long row, Slice columns) {
    cols = columns;
    if constexpr (Load::has_effect) {
      typename Load::template Begun<tile.pack_size> begun[tile.packs_per_thread];
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack)
        begun[pack] = load.template begin<tile.pack_size>(row, col(pack));
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        packs[pack] =
            load.finish(row, col(pack), begun[pack], register_pack_in_row<tile>(pack, cols.size()));
      }
    } else {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        packs[pack] = load.template load<tile.pack_size>(row, col(pack));
      }
    }
  }

  // The same from `own`, where this thread's first pack lies in each stream of the load. The other
  // packs are constants away.
  template <int num_streams>
  __device__ __forceinline__ void fetch_own(const typename Load::Held* const (&own)[num_streams],
                                            Slice columns) {
    cols = columns;
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const bool in_row = register_pack_in_row<tile>(pack, cols.size());
      // Beyond the row: the thread's first pack, or the row's first if the thread has one alone.
      const int otherwise = tile.packs_per_thread > 1 ? 0 : -register_col<tile>(0);
      const int from = in_row ? pack * tile.threads_per_row * tile.pack_size : otherwise;
      Pack<typename Load::Held, tile.pack_size> loaded[num_streams];
#pragma unroll
      for (int stream = 0; stream < num_streams; ++stream)
        loaded[stream] = load_pack<tile.pack_size>(own[stream] + from);
      packs[pack] = Load::combine(loaded);
    }
  }

  // Writes the row back, to the same places from `own`.
  __device__ __forceinline__ void store_own(typename Load::Held* own, bool present) const {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (present && register_pack_in_row<tile>(pack, cols.size())) {
        store_pack<tile.pack_size>(own + pack * tile.threads_per_row * tile.pack_size, packs[pack]);
      }
    }
  }

  // Where a pack of this thread begins: a constant away from its first pack, so that one address
  // serves all.
  __device__ __forceinline__ long long col_of(int pack) const {
    return cols.first_col + register_col<tile>(0) +
           static_cast<long long>(pack * (tile.cols() / tile.packs_per_thread));
  }

  // Where a pack is loaded from: for a pack beyond the row, the first column.
  __device__ __forceinline__ long long col(int pack) const {
    return register_pack_in_row<tile>(pack, cols.size()) ? col_of(pack) : cols.first_col;
  }
};
