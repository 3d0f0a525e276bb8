// register_gradient.cuh -- the gradient of rows that are kept in registers
//
// RegisterGradient keeps packs_per_thread packs of x and of dy in each thread (gradient_rows.cuh),
// and sums of dweight and dbias for the same columns from the first row to the last
// (register_sums.cuh). Used by backward_warp.cu, backward_block.cu and backward_cluster.cu.
#pragma once
#include "gradient_rows.cuh"
#include "register_sums.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
struct RegisterGradient
    : RegisterSums<typename LoadX::Compute, gradients, tile>,
      GradientRows<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile> {
  using Compute = typename LoadX::Compute;
  using Rows = GradientRows<LoadX, LoadDy, LoadWeight, StoreDx, gradients, centered, tile>;
  using Parameters = RegisterSums<Compute, gradients, tile>;
  using Parameters::dbias, Parameters::dweight;
  using Rows::Rows, Rows::added, Rows::cols, Rows::col, Rows::dy, Rows::fetch, Rows::fetch_added,
      Rows::fetch_ahead, Rows::in_bundle, Rows::in_row, Rows::joined, Rows::needs_weights,
      Rows::next, Rows::call, Rows::reciprocal, Rows::weights, Rows::x;
  using typename Parameters::Sums;

  // Adds a row to the sums and writes its dx, and y if the store recomputes it. following: the next
  // row of this thread.
  template <class Reduce>
  __device__ __forceinline__ void add_row(long long row, long long following, Reduce& reduce) {
    if constexpr (!fetch_ahead) fetch(row);
    if constexpr (!in_bundle) fetch_added(row);
    const bool present = row < call.num_rows;
    RowGradient<Compute, LoadX::normalized> gradient = next;
    Sums x_hats, wdys;
    Sum<Compute, 2> sums{};
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      // A pack beyond the row holds another pack of it, with dy = 0: a branch would keep packs from
      // overlapping.
      const bool counts = present && in_row(pack);
      Compute weight_values[tile.pack_size], of_joined[joined * tile.pack_size];
      unpack(x.packs[pack], x_hats[pack]);
      unpack(dy.packs[pack], wdys[pack]);
      if constexpr (needs_weights) {
        // If something is added to dx, there are no registers for unpacked weights.
        constexpr bool stays_packed = joined == 2 || LoadWeight::stays_packed || StoreDx::adds;
        if (pack % joined == 0 && stays_packed) weights[pack / joined].forget_unpacked();
        LoadWeight::unpack(weights[pack / joined], of_joined);
#pragma unroll
        for (int at = 0; at < tile.pack_size; ++at)
          weight_values[at] = of_joined[pack % joined * tile.pack_size + at];
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
          const Compute wdy = wdys[pack][at] = rounded_product(value, weight_values[at]);
          partial[0] += wdy * x_hat;
          if constexpr (centered) partial[1] += wdy;
        }
      }
      sums.part[0] = in_bundle ? partial[0] : sums.part[0] + partial[0];
      sums.part[1] = in_bundle ? partial[1] : sums.part[1] + partial[1];
      if constexpr (StoreDx::recomputes) {
        Compute biases[tile.pack_size];  // read from cache in each row: they would not fit the
                                         // registers
        call.store.load_bias().load(in_row(pack) ? col(pack) : cols.first_col, biases);
        call.store.recompute(row, col(pack), x_hats[pack], weight_values, biases, counts);
      }
    }
    if constexpr (fetch_ahead) fetch(following);
    if constexpr (gradients.dx) {
      gradient.finish(reduce.all(sums), reciprocal);
      auto own = call.store;
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

  // Writes the partial row `partial` of this block or cluster; smem: see RegisterSums.
  __device__ __forceinline__ void write_partials(long long partial, Compute* smem) {
    Parameters::write(call, cols, partial, smem);
  }
};
