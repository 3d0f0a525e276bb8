// register_gradient.cuh -- backward of the rows that wait in registers (backward_warp.cu, backward_block.cu)
//
// RegisterGradient: packs_per_thread packs of x and of dy in each thread, and as many float sums of dweight and dbias
// that live from the first row to the last.
#pragma once
#include "backward.cuh"

template <class Problem, Gradients gradients, bool centered, Tile tile>
struct RegisterGradient {
  using Compute = typename Problem::Compute;

  Compute dweight[tile.packs_per_thread][tile.pack_size] = {};
  Compute dbias[tile.packs_per_thread][tile.pack_size] = {};

  template <class Reduce>
  __device__ __forceinline__ void add_row(const Problem& problem, long long row, bool present, Reduce& reduce) {
    const int num_cols = present ? static_cast<int>(problem.num_cols) : 0;
    RegisterRow<decltype(problem.load_x), tile> x(problem.load_x, row, num_cols);
    RegisterRow<decltype(problem.load_dy), tile> dy(problem.load_dy, row, num_cols);
    RowGradient<Compute> gradient{};
    if (present) {
      if constexpr (centered) gradient.mean = problem.mean[row];
      gradient.rstd = problem.rstd[row];
    }

    Sum<Compute, 2> sums{};
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const int col = register_col<tile>(pack);
      if (col >= num_cols) continue;
      Compute xs[tile.pack_size], dys[tile.pack_size], weights[tile.pack_size];
      unpack(x.packs[pack], xs);
      unpack(dy.packs[pack], dys);
      if constexpr (gradients.dx) problem.scale.load(col, weights);
#pragma unroll
      for (int at = 0; at < tile.pack_size; ++at) {
        const Compute x_hat = gradient.template x_hat<centered>(xs[at]);
        if constexpr (gradients.dweight) dweight[pack][at] += dys[at] * x_hat;
        if constexpr (gradients.dbias) dbias[pack][at] += dys[at];
        if constexpr (gradients.dx) {
          const Compute wdy = dys[at] * weights[at];
          sums.part[0] += wdy * x_hat;
          if constexpr (centered) sums.part[1] += wdy;
        }
      }
    }
    if constexpr (gradients.dx) {
      gradient.finish(reduce.all(sums), static_cast<Compute>(problem.num_cols));
      x.forget_unpacked();
      dy.forget_unpacked();
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        const int col = register_col<tile>(pack);
        if (col >= num_cols) continue;
        Compute xs[tile.pack_size], dys[tile.pack_size], weights[tile.pack_size], dx[tile.pack_size];
        unpack(x.packs[pack], xs);
        unpack(dy.packs[pack], dys);
        problem.scale.load(col, weights);
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at) {
          const Compute x_hat = gradient.template x_hat<centered>(xs[at]);
          dx[at] = gradient.template dx<centered>(x_hat, dys[at] * weights[at]);
        }
        problem.store.store(row, col, dx);
      }
    }
  }

  // This block's partial row. Groups of threads that took different rows add theirs one after the other, in order.
  __device__ __forceinline__ void write_partials(const Problem& problem, Compute* smem) {
    const long long offset = static_cast<long long>(blockIdx.x) * problem.num_cols;
    if constexpr (gradients.dweight) write(problem.dweight_partials + offset, dweight, problem.num_cols, smem);
    if constexpr (gradients.dbias) write(problem.dbias_partials + offset, dbias, problem.num_cols, smem);
  }

 private:
  using Sums = Compute[tile.packs_per_thread][tile.pack_size];

  __device__ __forceinline__ void write(Compute* partials, Sums& sums, long long num_cols, Compute* smem) {
    const int group = threadIdx.x / tile.threads_per_row;
    for (int turn = 0; turn < tile.rows_per_block; ++turn) {
      if (group == turn) {
#pragma unroll
        for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
          const int col = register_col<tile>(pack);
          if (col >= num_cols) continue;
          if (turn > 0) {
#pragma unroll
            for (int at = 0; at < tile.pack_size; ++at) sums[pack][at] += smem[col + at];
          }
          if (turn == tile.rows_per_block - 1) {
            // Partial rows are num_cols long: only a pack_size that divides num_cols keeps them aligned, as it does here.
            store_pack<tile.pack_size>(partials + col, repack<Compute>(sums[pack]));
          } else {
#pragma unroll
            for (int at = 0; at < tile.pack_size; ++at) smem[col + at] = sums[pack][at];
          }
        }
      }
      if constexpr (tile.rows_per_block > 1) __syncthreads();
    }
  }
};
