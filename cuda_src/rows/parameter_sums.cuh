// parameter_sums.cuh -- dweight and dbias: sums over rows, a few columns a block, in a fixed order
//
// A block owns threads_per_row neighbouring packs of columns at a time. Group g of its
// rows_per_block groups adds rows g, g + rows_per_block, ... The groups of a warp are added in
// pairs, then the warps in order.
#pragma once
#include "backward.cuh"

// Rows of partial sums. add(row, col, dweights, dbiases) adds a pack of one row to a thread's sums.
// A pointer may be null if its gradient is not wanted.
template <class C>
struct PartialSums {
  using Compute = C;
  const Compute* dweight_partials;
  const Compute* dbias_partials;
  long long stride;

  template <bool dweight, bool dbias, int pack_size>
  __device__ __forceinline__ void add(long long row, long long col, Compute (&dweights)[pack_size],
                                      Compute (&dbiases)[pack_size]) const {
    if constexpr (dweight) add_to(dweights, dweight_partials + row * stride + col);
    if constexpr (dbias) add_to(dbiases, dbias_partials + row * stride + col);
  }

 private:
  template <int pack_size>
  __device__ __forceinline__ static void add_to(Compute (&sums)[pack_size],
                                                const Compute* partials) {
    Compute values[pack_size];
    unpack(load_pack<pack_size>(partials), values);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) sums[at] += values[at];
  }
};

// dy * x_hat and dy, computed from the rows themselves.
template <class LoadX, class LoadDy, bool centered>
struct RowProducts {
  using Compute = typename LoadX::Compute;
  LoadX load_x;
  LoadDy load_dy;
  const Compute* mean;
  const Compute* rstd;

  template <bool dweight, bool dbias, int pack_size>
  __device__ __forceinline__ void add(long long row, long long col, Compute (&dweights)[pack_size],
                                      Compute (&dbiases)[pack_size]) const {
    Compute dys[pack_size];
    unpack(load_dy.template load<pack_size>(row, col), dys);
    if constexpr (dweight) {
      Compute xs[pack_size];
      unpack(load_x.template load<pack_size>(row, col), xs);
      RowGradient<Compute> gradient{};
      if constexpr (centered) gradient.mean = mean[row];
      gradient.rstd = rstd[row];
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        dweights[at] += dys[at] * gradient.template x_hat<centered>(xs[at]);
    }
    if constexpr (dbias) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) dbiases[at] += dys[at];
    }
  }
};

template <class Rows, class Dweight, class Dbias>
struct Parameters {
  Rows rows;
  Dweight* dweight;  // [num_cols]; void: not wanted
  Dbias* dbias;      // [num_cols]; void: not wanted
  long long num_rows;
  long long num_cols;
};

// Block `block` of num_blocks. smem: for 2 * pack_size * threads_per_row sums a warp.
template <Tile tile, class Rows, class Dweight, class Dbias>
__device__ __forceinline__ void sum_parameters(const Parameters<Rows, Dweight, Dbias>& call,
                                               int block, int num_blocks, unsigned char* smem) {
  using Compute = typename Rows::Compute;
  constexpr bool has_dweight = !is_same<Dweight, void>;
  constexpr bool has_dbias = !is_same<Dbias, void>;
  constexpr int pack_size = tile.pack_size;
  constexpr int num_warps = tile.block_size() / 32;
  const int lane = threadIdx.x % tile.threads_per_row;
  const int group = threadIdx.x / tile.threads_per_row;
  constexpr int block_cols = tile.threads_per_row * pack_size;
  auto* sums = reinterpret_cast<Compute*>(smem);  // [num_warps][dweight, dbias][block_cols]
  const long long step = static_cast<long long>(num_blocks) * block_cols;

  for (long long first_col = static_cast<long long>(block) * block_cols; first_col < call.num_cols;
       first_col += step) {
    const long long col = first_col + lane * pack_size;
    Compute dweights[pack_size] = {}, dbiases[pack_size] = {};
    if (col < call.num_cols) {
#pragma unroll 4
      for (long long row = group; row < call.num_rows; row += tile.rows_per_block) {
        call.rows.template add<has_dweight, has_dbias>(row, col, dweights, dbiases);
      }
    }
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
#pragma unroll
      for (int distance = tile.threads_per_row; distance < 32; distance *= 2) {
        if constexpr (has_dweight)
          dweights[at] += __shfl_xor_sync(0xffffffffu, dweights[at], distance);
        if constexpr (has_dbias) dbiases[at] += __shfl_xor_sync(0xffffffffu, dbiases[at], distance);
      }
    }
    if (threadIdx.x % 32 < tile.threads_per_row) {
      Compute* own = sums + threadIdx.x / 32 * 2 * block_cols + lane * pack_size;
#pragma unroll
      for (int at = 0; at < pack_size; ++at) {
        own[at] = dweights[at];
        own[block_cols + at] = dbiases[at];
      }
    }
    __syncthreads();
    // One thread for each column of dweight, another for dbias.
    for (int at = threadIdx.x; at < 2 * block_cols; at += tile.block_size()) {
      Compute sum = sums[at];
#pragma unroll
      for (int warp = 1; warp < num_warps; ++warp) sum += sums[warp * 2 * block_cols + at];
      const long long at_col = first_col + at % block_cols;
      if (at_col < call.num_cols) {
        const Compute lone[1] = {sum};
        if constexpr (has_dweight) {
          if (at < block_cols) store_pack<1>(call.dweight + at_col, repack<Dweight>(lone));
        }
        if constexpr (has_dbias) {
          if (at >= block_cols) store_pack<1>(call.dbias + at_col, repack<Dbias>(lone));
        }
      }
    }
    __syncthreads();
  }
}
