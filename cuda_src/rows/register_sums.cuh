// register_sums.cuh -- sums of dweight and dbias over rows, in registers
//
// A thread adds up the columns of its packs from the first row to the last. At the end a block or
// cluster writes its sums as one partial row.
#pragma once
#include "register_cols.cuh"

template <class Compute, Gradients gradients, Tile tile>
struct RegisterSums {
  using Sums = Compute[tile.packs_per_thread][tile.pack_size];

  Sums dweight = {};
  Sums dbias = {};

  // Writes the partial row `partial` of this block or cluster. Groups of threads that worked on
  // different rows add their sums: in pairs within a warp, then warp after warp through smem, which
  // is [warps of the block][dweight, dbias][num_cols].
  // call: a Backward; cols: of this block.
  template <class Call>
  __device__ __forceinline__ void write(const Call& call, Slice cols, long long partial,
                                        Compute* smem) {
    const long long offset = partial * call.num_cols + cols.first_col;
    if constexpr (tile.rows_per_block > 1) {
      for_each_sum(call, [&](Compute*, Sums& sums, int) { add_groups_of_warp(sums); });
      constexpr int num_warps = tile.block_size() / 32;
      const int num_cols = cols.size();
      if constexpr (num_warps > 1) {
        if (threadIdx.x % 32 < tile.threads_per_row) {
          Compute* own = smem + threadIdx.x / 32 * 2 * num_cols;
          for_each_sum(call, [&](Compute*, Sums& sums, int which) {
            store(own + which * num_cols, sums, cols);
          });
        }
        __syncthreads();
        for_each_sum(call, [&](Compute* partials, Sums&, int which) {
          for (int col = threadIdx.x; col < num_cols; col += tile.block_size()) {
            Compute sum = smem[which * num_cols + col];
#pragma unroll
            for (int warp = 1; warp < num_warps; ++warp)
              sum += smem[(2 * warp + which) * num_cols + col];
            partials[offset + col] = sum;
          }
        });
        return;
      }
      if (threadIdx.x >= tile.threads_per_row) return;
    }
    for_each_sum(call,
                 [&](Compute* partials, Sums& sums, int) { store(partials + offset, sums, cols); });
  }

 private:
  // f(partial rows, sums of this thread, index) for dweight (index 0) and dbias (1), if wanted.
  template <class Call, class F>
  __device__ __forceinline__ void for_each_sum(const Call& call, F f) {
    if constexpr (gradients.dweight) f(call.dweight_partials, dweight, 0);
    if constexpr (gradients.dbias) f(call.dbias_partials, dbias, 1);
  }
  __device__ __forceinline__ static void add_groups_of_warp(Sums& sums) {
#pragma unroll
    for (int distance = tile.threads_per_row; distance < 32; distance *= 2) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at) {
          sums[pack][at] += __shfl_xor_sync(0xffffffffu, sums[pack][at], distance);
        }
      }
    }
  }
  // pack_size divides num_cols, so the packs of every partial row are aligned.
  __device__ __forceinline__ static void store(Compute* row, const Sums& sums, Slice cols) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (register_pack_in_row<tile>(pack, cols.size()))
        store_pack<tile.pack_size>(row + register_col<tile>(pack), repack<Compute>(sums[pack]));
    }
  }
};
