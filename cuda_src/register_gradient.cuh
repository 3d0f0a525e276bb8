// register_gradient.cuh -- the gradient of rows that are kept in registers
//
// RegisterGradient keeps packs_per_thread packs of x and of dy in each thread, and sums of dweight
// and dbias for the same columns from the first row to the last. If registers allow, it fetches the
// next row while it computes the present one. Used by backward_warp.cu, backward_block.cu and
// backward_cluster.cu.
#pragma once
#include "backward.cuh"
#include "register_row.cuh"

template <class LoadX, class LoadDy, class Weights, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
struct RegisterGradient {
  using Compute = typename LoadX::Compute;
  using Problem = Backward<LoadX, LoadDy, Weights, StoreDx>;
  using Sums = Compute[tile.packs_per_thread][tile.pack_size];

  static constexpr bool in_bundle = tile.path == Path::bundle;
  // Packs of 16-bit elements leave registers for a second row. Packs of 32 bits and single elements
  // do not.
  static constexpr bool fetch_ahead =
      sizeof(typename LoadX::Held) + sizeof(typename LoadDy::Held) <= 4 && tile.pack_size > 1 &&
      !in_bundle;

  static constexpr bool needs_weights = gradients.dx || StoreDx::recomputes;

  const Problem& problem;
  Slice cols;  // of this block
  Compute reciprocal;
  Sums dweight = {};
  Sums dbias = {};
  // Two single elements are kept as one pack: each would take a register.
  static constexpr int joined = in_bundle ? 2 : 1;
  typename Weights::template Kept<joined * tile.pack_size>
      weights[(tile.packs_per_thread + joined - 1) / joined];
  RegisterRow<LoadX, tile> x;
  RegisterRow<LoadDy, tile> dy;
  RegisterRow<Load<typename StoreDx::Added>, tile> added;  // what is added to dx, if anything is
  RowGradient<Compute, LoadX::normalized> next;

  __device__ __forceinline__ RegisterGradient(const Problem& problem, Slice cols)
      : problem(problem),
        cols(cols),
        reciprocal(Compute(1) / static_cast<Compute>(problem.num_cols)) {
    if constexpr (needs_weights) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; pack += joined) {
        const int from = in_row(pack) ? col(pack) : cols.first_col;
        if constexpr (joined == 2) {
          const int other =
              pack + 1 < tile.packs_per_thread && in_row(pack + 1) ? col(pack + 1) : cols.first_col;
          weights[pack / 2] = problem.scale.template keep_two<tile.pack_size>(from, other);
        } else {
          weights[pack] = problem.scale.template keep<tile.pack_size>(from);
        }
      }
    }
  }

  __device__ __forceinline__ bool in_row(int pack) const {
    return register_pack_in_row<tile>(pack, cols.size());
  }
  __device__ __forceinline__ int col(int pack) const {
    return cols.first_col + register_col<tile>(pack);
  }

  // Called before the first row.
  __device__ __forceinline__ void start(long long row) {
    if constexpr (fetch_ahead) fetch(row);
  }

  // Starts the loads of a row. Beyond the last row it loads the last one again; add_row then
  // ignores it.
  __device__ __forceinline__ void fetch(long long row) {
    if (row >= problem.num_rows) row = max(problem.num_rows, 1LL) - 1;
    if constexpr (in_bundle) {
      x.fetch_own({problem.load_x.row_start(row) + col(0)}, cols);
      dy.fetch_own({problem.load_dy.row_start(row) + col(0)}, cols);
    } else {
      x.fetch(problem.load_x, row, cols);
      dy.fetch(problem.load_dy, row, cols);
    }
    if constexpr (centered && !LoadX::normalized) next.mean = problem.mean[row];
    next.rstd = problem.rstd[row];
  }

  // The same for what is added to dx: all of it before the first pack of dx is stored, because the
  // compiler keeps loads behind that store.
  __device__ __forceinline__ void fetch_added(long long row) {
    if constexpr (StoreDx::adds && gradients.dx) {
      if (row >= problem.num_rows) row = max(problem.num_rows, 1LL) - 1;
      if constexpr (in_bundle) {
        added.fetch_own({problem.store.added_start(row) + col(0)}, cols);
      } else {
        added.fetch({problem.store.added_start(0), problem.store.added_stride()}, row, cols);
      }
    }
  }

  // Adds a row to the sums and writes its dx, and y if the store recomputes it. following: the next
  // row of this thread.
  template <class Reduce>
  __device__ __forceinline__ void add_row(long long row, long long following, Reduce& reduce) {
    if constexpr (!fetch_ahead) fetch(row);
    if constexpr (!in_bundle) fetch_added(row);
    const bool present = row < problem.num_rows;
    RowGradient<Compute, LoadX::normalized> gradient = next;
    Sums x_hats, wdys;
    Sum<Compute, 2> sums{};
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      // A pack beyond the row holds another pack of it, with dy = 0: a branch would keep packs from
      // overlapping.
      const bool counts = present && in_row(pack);
      Compute scales[tile.pack_size], of_joined[joined * tile.pack_size];
      unpack(x.packs[pack], x_hats[pack]);
      unpack(dy.packs[pack], wdys[pack]);
      if constexpr (needs_weights) {
        // If something is added to dx, there are no registers for unpacked weights.
        constexpr bool stays_packed = joined == 2 || Weights::stays_packed || StoreDx::adds;
        if (pack % joined == 0 && stays_packed) weights[pack / joined].forget_unpacked();
        Weights::unpack(weights[pack / joined], of_joined);
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at)
          scales[at] = of_joined[pack % joined * tile.pack_size + at];
      }
      // Each pack has its own sums, so that packs overlap. For single elements that costs more than
      // it gains.
      Compute partial[2] = {};
      if constexpr (in_bundle) partial[0] = sums.part[0], partial[1] = sums.part[1];
#pragma unroll
      for (int at = 0; at < tile.pack_size; ++at) {
        const Compute x_hat = x_hats[pack][at] =
            gradient.template x_hat<centered>(x_hats[pack][at]);
        const Compute value = counts ? wdys[pack][at] : Compute(0);
        if constexpr (gradients.dweight) dweight[pack][at] += value * x_hat;
        if constexpr (gradients.dbias) dbias[pack][at] += value;
        if constexpr (gradients.dx) {
          const Compute wdy = wdys[pack][at] = rounded_product(value, scales[at]);
          partial[0] += wdy * x_hat;
          if constexpr (centered) partial[1] += wdy;
        }
      }
      sums.part[0] = in_bundle ? partial[0] : sums.part[0] + partial[0];
      sums.part[1] = in_bundle ? partial[1] : sums.part[1] + partial[1];
      if constexpr (StoreDx::recomputes) {
        Compute biases[tile.pack_size];  // read from cache in each row: they would not fit the
                                         // registers
        problem.store.biases().load(in_row(pack) ? col(pack) : cols.first_col, biases);
        problem.store.recompute(row, col(pack), x_hats[pack], scales, biases, counts);
      }
    }
    if constexpr (fetch_ahead) fetch(following);
    if constexpr (gradients.dx) {
      gradient.finish(reduce.all(sums), reciprocal);
      auto own = problem.store;
      if constexpr (in_bundle) {
        fetch_added(row);
        own.written() += row * own.written_stride() + col(0);
        __syncwarp();  // all lanes have read what the results overwrite
      }
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        Compute dx[tile.pack_size];
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at) {
          dx[at] = gradient.template dx<centered>(x_hats[pack][at], wdys[pack][at]);
        }
        const long long own_row = in_bundle ? 0 : row;
        const long long own_col =
            in_bundle ? pack * tile.threads_per_row * tile.pack_size : col(pack);
        if constexpr (StoreDx::adds) {
          own.store(own_row, own_col, dx, added.packs[pack], present && in_row(pack));
        } else {
          own.store(own_row, own_col, dx, present && in_row(pack));
        }
      }
    }
  }

  // Writes the partial row `partial` of this block or cluster. Groups of threads that worked on
  // different rows add their sums: in pairs within a warp, then warp after warp through smem, which
  // is [warps of the block][dweight, dbias][num_cols].
  __device__ __forceinline__ void write_partials(long long partial, Compute* smem) {
    const long long offset = partial * problem.num_cols + cols.first_col;
    if constexpr (tile.rows_per_block > 1) {
      for_each_sum([&](Compute*, Sums& sums, int) { add_groups_of_warp(sums); });
      constexpr int num_warps = tile.block_size() / 32;
      const int num_cols = cols.size();
      if constexpr (num_warps > 1) {
        if (threadIdx.x % 32 < tile.threads_per_row) {
          Compute* own = smem + threadIdx.x / 32 * 2 * num_cols;
          for_each_sum(
              [&](Compute*, Sums& sums, int which) { store(own + which * num_cols, sums); });
        }
        __syncthreads();
        for_each_sum([&](Compute* partials, Sums&, int which) {
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
    for_each_sum([&](Compute* partials, Sums& sums, int) { store(partials + offset, sums); });
  }

 private:
  // f(partial rows, sums of this thread, index) for dweight (index 0) and dbias (1), if wanted.
  template <class F>
  __device__ __forceinline__ void for_each_sum(F f) {
    if constexpr (gradients.dweight) f(problem.dweight_partials, dweight, 0);
    if constexpr (gradients.dbias) f(problem.dbias_partials, dbias, 1);
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
  __device__ __forceinline__ void store(Compute* row, const Sums& sums) const {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (in_row(pack))
        store_pack<tile.pack_size>(row + register_col<tile>(pack), repack<Compute>(sums[pack]));
    }
  }
};
