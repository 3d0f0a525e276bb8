// register_gradient.cuh -- backward of the rows that wait in registers (backward_warp.cu, _block.cu, _cluster.cu)
//
// RegisterGradient: packs_per_thread packs of x and of dy in each thread, and as many sums of dweight and dbias that live
// from the first row to the last. Where registers allow, the next row is on its way while this one is computed.
#pragma once
#include "backward.cuh"

template <class LoadX, class LoadDy, class Weights, class StoreDx, Gradients gradients, bool centered, Tile tile>
struct RegisterGradient {
  using Compute = typename LoadX::Compute;
  using Problem = Backward<LoadX, LoadDy, Weights, StoreDx>;
  using Sums = Compute[tile.packs_per_thread][tile.pack_size];

  // Packs of 16-bit elements leave registers for a second row; those of 32 bits, and lone elements, do not.
  static constexpr bool fetch_ahead = sizeof(typename LoadX::Held) + sizeof(typename LoadDy::Held) <= 4 && tile.pack_size > 1;

  const Problem& problem;
  Slice cols;  // of this block
  Compute reciprocal;
  Sums dweight = {};
  Sums dbias = {};
  typename Weights::template Kept<tile.pack_size> weights[tile.packs_per_thread];
  RegisterRow<LoadX, tile> x;
  RegisterRow<LoadDy, tile> dy;
  RowGradient<Compute> next;

  __device__ __forceinline__ RegisterGradient(const Problem& problem, Slice cols)
      : problem(problem), cols(cols), reciprocal(Compute(1) / static_cast<Compute>(problem.num_cols)) {
    if constexpr (gradients.dx) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        if (in_row(pack)) weights[pack] = problem.scale.template keep<tile.pack_size>(col(pack));
      }
    }
  }

  __device__ __forceinline__ bool in_row(int pack) const { return register_pack_in_row<tile>(pack, cols.size()); }
  __device__ __forceinline__ int col(int pack) const { return cols.first_col + register_col<tile>(pack); }

  // Before the first row.
  __device__ __forceinline__ void start(long long row) {
    if constexpr (fetch_ahead) fetch(row);
  }

  // Starts the loads of a row. Beyond the last row it is the last one again, which `add_row` then leaves out.
  __device__ __forceinline__ void fetch(long long row) {
    if (row >= problem.num_rows) row = problem.num_rows - 1;
    x.fetch(problem.load_x, row, cols);
    dy.fetch(problem.load_dy, row, cols);
    if constexpr (centered) next.mean = problem.mean[row];
    next.rstd = problem.rstd[row];
  }

  // Adds a row to the sums and writes its dx; `following` is the row that this thread takes next.
  template <class Reduce>
  __device__ __forceinline__ void add_row(long long row, long long following, Reduce& reduce) {
    if constexpr (!fetch_ahead) fetch(row);
    const bool present = row < problem.num_rows;
    RowGradient<Compute> gradient = next;
    Sums x_hats, wdys;
    Sum<Compute, 2> sums{};
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (!in_row(pack)) continue;
      Compute scales[tile.pack_size];
      unpack(x.packs[pack], x_hats[pack]);
      unpack(dy.packs[pack], wdys[pack]);
      if constexpr (gradients.dx) weights[pack].unpack_to(scales, 1.0f);
      Compute partial[2] = {};
#pragma unroll
      for (int at = 0; at < tile.pack_size; ++at) {
        const Compute x_hat = x_hats[pack][at] = gradient.template x_hat<centered>(x_hats[pack][at]);
        const Compute value = present ? wdys[pack][at] : Compute(0);
        if constexpr (gradients.dweight) dweight[pack][at] += value * x_hat;
        if constexpr (gradients.dbias) dbias[pack][at] += value;
        if constexpr (gradients.dx) {
          const Compute wdy = wdys[pack][at] = times(value, scales[at]);
          partial[0] += wdy * x_hat;
          if constexpr (centered) partial[1] += wdy;
        }
      }
      sums.part[0] += partial[0];
      sums.part[1] += partial[1];
    }
    if constexpr (fetch_ahead) fetch(following);
    if constexpr (gradients.dx) {
      gradient.finish(reduce.all(sums), reciprocal);
      if (!present) return;
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        if (!in_row(pack)) continue;
        Compute dx[tile.pack_size];
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at) {
          dx[at] = gradient.template dx<centered>(x_hats[pack][at], wdys[pack][at]);
        }
        problem.store.store(row, col(pack), dx);
      }
    }
  }

  // Partial row `partial`, of this block or cluster. Groups of threads that took different rows add theirs one after the
  // other, in order.
  __device__ __forceinline__ void write_partials(long long partial, Compute* smem) {
    const long long offset = partial * problem.num_cols + cols.first_col;
    if constexpr (gradients.dweight) write(problem.dweight_partials + offset, dweight, smem);
    if constexpr (gradients.dbias) write(problem.dbias_partials + offset, dbias, smem);
  }

 private:
  __device__ __forceinline__ void write(Compute* partials, Sums& sums, Compute* smem) {
    const int group = threadIdx.x / tile.threads_per_row;
    for (int turn = 0; turn < tile.rows_per_block; ++turn) {
      if (group == turn) {
#pragma unroll
        for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
          if (!in_row(pack)) continue;
          const int at_col = register_col<tile>(pack);
          if (turn > 0) {
#pragma unroll
            for (int at = 0; at < tile.pack_size; ++at) sums[pack][at] += smem[at_col + at];
          }
          if (turn == tile.rows_per_block - 1) {
            // pack_size divides num_cols, so the packs of every partial row are aligned.
            store_pack<tile.pack_size>(partials + at_col, repack<Compute>(sums[pack]));
          } else {
#pragma unroll
            for (int at = 0; at < tile.pack_size; ++at) smem[at_col + at] = sums[pack][at];
          }
        }
      }
      if constexpr (tile.rows_per_block > 1) __syncthreads();
    }
  }
};
