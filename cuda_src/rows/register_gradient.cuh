// register_gradient.cuh -- the gradient of rows that are kept in registers
//
// Each thread keeps packs_per_thread packs of x and of dy, and sums of dweight and dbias for the
// same columns from the first row to the last. If registers allow, the next row is fetched while
// the present one is computed.
#pragma once
#include "backward.cuh"
#include "register_row.cuh"

// x, dy, weights and an added gradient.
template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
struct GradientRows {
  using Compute = typename LoadX::Compute;
  using Call = Backward<LoadX, LoadDy, LoadWeight, StoreDx>;

  static constexpr bool in_bundle = tile.path == Path::bundle;
  // Packs of 16-bit elements leave registers for a second row, others do not.
  static constexpr bool fetch_ahead =
      sizeof(typename LoadX::Held) + sizeof(typename LoadDy::Held) <= 4 && tile.pack_size > 1 &&
      !in_bundle;
  static constexpr bool needs_weights = gradients.dx || StoreDx::recomputes;

  const Call& call;
  Slice cols;  // of this block
  KeptPacks<typename LoadWeight::Parameter, LoadWeight::is_zero_centered, tile.pack_size,
            tile.packs_per_thread, in_bundle ? 2 : 1>
      weights;
  RegisterRow<LoadX, tile> x;
  RegisterRow<LoadDy, tile> dy;
  RegisterRow<Load<typename StoreDx::Added>, tile> added;  // what is added to dx, if anything is
  RowGradient<Compute> gradient;                           // of the row that was fetched last

  __device__ __forceinline__ GradientRows(const Call& call, Slice cols) : call(call), cols(cols) {
    if constexpr (needs_weights)
      weights.load(call.load_weight.weight, [&](int pack) { return col_or_first(pack); });
  }

  __device__ __forceinline__ bool in_row(int pack) const {
    return register_pack_in_row<tile>(pack, cols.size());
  }
  __device__ __forceinline__ int col(int pack) const {
    return cols.first_col + register_col<tile>(pack);
  }
  // Where a parameter is loaded from: for a pack beyond the row, the first column.
  __device__ __forceinline__ int col_or_first(int pack) const {
    return pack < tile.packs_per_thread && in_row(pack) ? col(pack) : cols.first_col;
  }

  __device__ __forceinline__ void unpack_weights(int pack, Compute (&values)[tile.pack_size]) {
    // If something is added to dx, there are no registers for unpacked weights.
    constexpr bool stays_packed = in_bundle || LoadWeight::stays_packed || StoreDx::adds;
    if constexpr (needs_weights) weights.unpack(pack, values, 1.0f, stays_packed);
  }

  // Starts the loads of a row; beyond the last row, of the last one, which the caller ignores.
  __device__ __forceinline__ void fetch(long long row) {
    if (row >= call.num_rows) row = max(call.num_rows, 1LL) - 1;
    if constexpr (in_bundle) {
      x.fetch_own({call.load_x.row_start(row) + col(0)}, cols);
      dy.fetch_own({call.load_dy.row_start(row) + col(0)}, cols);
    } else {
      x.fetch(call.load_x, row, cols);
      dy.fetch(call.load_dy, row, cols);
    }
    gradient = call.template gradient_of<centered>(row);
  }

  // The same for what is added to dx: all of it before the first pack of dx is stored, because the
  // compiler keeps loads behind that store.
  __device__ __forceinline__ void fetch_added(long long row) {
    if constexpr (StoreDx::adds && gradients.dx) {
      if (row >= call.num_rows) row = max(call.num_rows, 1LL) - 1;
      if constexpr (in_bundle) {
        added.fetch_own({call.store.added_start(row) + col(0)}, cols);
      } else {
        added.fetch({call.store.added_start(0), call.store.added_stride()}, row, cols);
      }
    }
  }
};

// Sums of a thread's columns over its rows, which a block or cluster writes as one partial row.
template <class Compute, Gradients gradients, Tile tile>
struct RegisterSums {
  using Sums = Compute[tile.packs_per_thread][tile.pack_size];

  Sums dweight = {};
  Sums dbias = {};

  // Writes the partial row `partial` of this block or cluster. Groups of threads that worked on
  // different rows add their sums: in pairs within a warp, then warp after warp through smem, which
  // is [warps of the block][dweight, dbias][num_cols]. call: a Backward; cols: of this block.
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

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
struct RegisterGradient {
  using Compute = typename LoadX::Compute;
  using Rows = GradientRows<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile>;
  static constexpr bool in_bundle = Rows::in_bundle;

  Rows rows;
  RegisterSums<Compute, gradients, tile> sums;
  Compute reciprocal;

  // cols: of this block; first_row: of this thread.
  __device__ __forceinline__ RegisterGradient(const typename Rows::Call& call, Slice cols,
                                              long long first_row)
      : rows(call, cols), reciprocal(Compute(1) / static_cast<Compute>(call.num_cols)) {
    if constexpr (Rows::fetch_ahead) rows.fetch(first_row);
  }

  // Adds a row to the sums and writes its dx, and y if the store recomputes it. following: the next
  // row of this thread.
  template <class Reduce>
  __device__ __forceinline__ void add_row(long long row, long long following, Reduce& reduce) {
    if constexpr (!Rows::fetch_ahead) rows.fetch(row);
    if constexpr (!in_bundle) rows.fetch_added(row);
    const auto& call = rows.call;
    const bool present = row < call.num_rows;
    auto gradient = rows.gradient;
    Compute x_hats[tile.packs_per_thread][tile.pack_size];
    Compute wdys[tile.packs_per_thread][tile.pack_size];
    Sum<Compute, 2> total{};
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      // A pack beyond the row holds another pack of it, with dy = 0: a branch would keep packs from
      // overlapping.
      const bool counts = present && rows.in_row(pack);
      Compute weights[tile.pack_size];
      unpack(rows.x.packs[pack], x_hats[pack]);
      unpack(rows.dy.packs[pack], wdys[pack]);
      rows.unpack_weights(pack, weights);
      // Each pack has its own sums, so that packs overlap. For single elements that costs more than
      // it gains.
      Sum<Compute, 2> of_pack{};
      if constexpr (in_bundle) of_pack = total;
#pragma unroll
      for (int at = 0; at < tile.pack_size; ++at) {
        const Compute x_hat = x_hats[pack][at] =
            gradient.template x_hat<centered>(x_hats[pack][at]);
        const Compute dy = counts ? wdys[pack][at] : Compute(0);
        if constexpr (gradients.dweight) sums.dweight[pack][at] += dy * x_hat;
        if constexpr (gradients.dbias) sums.dbias[pack][at] += dy;
        if constexpr (gradients.dx) {
          const Compute wdy = wdys[pack][at] = rounded_product(dy, weights[at]);
          of_pack.part[0] += wdy * x_hat;
          if constexpr (centered) of_pack.part[1] += wdy;
        }
      }
      if constexpr (in_bundle) {
        total = of_pack;
      } else {
        total.merge(of_pack);
      }
      if constexpr (StoreDx::recomputes) {
        Compute biases[tile.pack_size];  // from the cache for each row: registers have no room
        call.store.load_bias().load(rows.col_or_first(pack), biases);
        call.store.recompute(row, rows.col(pack), x_hats[pack], weights, biases, counts);
      }
    }
    if constexpr (Rows::fetch_ahead) rows.fetch(following);
    if constexpr (gradients.dx) {
      gradient.finish(reduce.all(total), reciprocal);
      auto store = call.store;
      if constexpr (in_bundle) {
        // The place of this thread's first pack of dx; the others are constants away.
        store.written() += row * store.written_stride() + rows.col(0);
        rows.fetch_added(row);
        __syncwarp();  // all lanes have read what the results overwrite
      }
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        Compute dx[tile.pack_size];
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at)
          dx[at] = gradient.template dx<centered>(x_hats[pack][at], wdys[pack][at]);
        const long long own_col =
            in_bundle ? pack * tile.threads_per_row * tile.pack_size : rows.col(pack);
        store.store(in_bundle ? 0 : row, own_col, dx, rows.added.packs[pack],
                    present && rows.in_row(pack));
      }
    }
  }
  // smem: see RegisterSums.
  __device__ __forceinline__ void write_partials(long long partial, Compute* smem) {
    sums.write(rows.call, rows.cols, partial, smem);
  }
};
