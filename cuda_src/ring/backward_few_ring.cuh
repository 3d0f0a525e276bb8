// backward_few_ring.cuh -- dx of a row of path `ring`, in registers, where rows are few
//
// A ring takes time to start. Here each thread loads the packs that a ring would bring it, from all
// blocks of its cluster, and everything is added in the ring's order: dx has the same bits.
#pragma once
#include "backward.cuh"
#include "exchange.cuh"

template <bool centered, Tile tile, class LoadX, class LoadDy, class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_few_ring(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call) {
  using Compute = typename LoadX::Compute;
  using Shape = RingShape<tile>;
  using Sources = Exchange<tile>;
  constexpr Gradients gradients{.dx = true, .dweight = false, .dbias = false};
  constexpr int pack_size = tile.pack_size;
  constexpr int packs_per_thread = tile.packs_per_thread;
  constexpr int threads = 32 * Sources::num_sources;  // that share a row
  const int group = threadIdx.x / threads;
  const int source = threadIdx.x % threads / 32;
  const Slice cols = Shape::part_of(source, static_cast<int>(call.num_cols));
  const long long own_row = static_cast<long long>(blockIdx.x) * tile.rows_per_block + group;
  const bool present = own_row < call.num_rows;
  const long long row = present ? own_row : call.num_rows - 1;
  const auto col_of = [&](int pack) {
    return Shape::in_part(pack, cols) ? cols.first_col + Shape::col(pack) : 0;
  };

  // All loads start before the first use.
  Pack<typename LoadX::Held, pack_size> xs[packs_per_thread];
  Pack<typename LoadDy::Held, pack_size> dys[packs_per_thread];
  Pack<typename StoreDx::Added, pack_size> added[packs_per_thread];
  typename LoadWeight::template Kept<pack_size> weights[packs_per_thread];
#pragma unroll
  for (int pack = 0; pack < packs_per_thread; ++pack) {
    xs[pack] = call.load_x.template load<pack_size>(row, col_of(pack));
    dys[pack] = call.load_dy.template load<pack_size>(row, col_of(pack));
  }
  auto gradient = call.template gradient_of<centered>(row);
#pragma unroll
  for (int pack = 0; pack < packs_per_thread; ++pack) {
    weights[pack] = call.load_weight.template keep<pack_size>(col_of(pack));
    added[pack] = call.store.template load_added<pack_size>(row, col_of(pack));
  }

  // f(pack, xs, dys, weight_values)
  const auto for_each_pack = [&](auto f) {
#pragma unroll
    for (int pack = 0; pack < packs_per_thread; ++pack) {
      Compute x_values[pack_size], dy_values[pack_size], weight_values[pack_size];
      unpack(xs[pack], x_values);
      unpack(dys[pack], dy_values);
      LoadWeight::unpack(weights[pack], weight_values);
      f(pack, x_values, dy_values, weight_values);
      forget_unpacked(xs[pack]);
      forget_unpacked(dys[pack]);
      weights[pack].forget_unpacked();
    }
  };
  Sum<Compute, 2> sums{};
  for_each_pack(
      [&](int pack, const auto& x_values, const auto& dy_values, const auto& weight_values) {
        Compute none[pack_size];
        sums.merge(sum_pack<gradients, centered>(none, none, x_values, dy_values, weight_values,
                                                 gradient, Shape::in_part(pack, cols)));
      });
  float* const sent = reinterpret_cast<float*>(dynamic_smem()) + 2 * Sources::num_sources * group;
  const float of_warp = warp_reduce_two(sums.part[0], sums.part[1]);
  if (threadIdx.x % 16 == 0) sent[has_second() * Sources::num_sources + source] = of_warp;
  __syncthreads();
  gradient.finish(Sources::total(sent), Compute(1) / static_cast<Compute>(call.num_cols));

  for_each_pack(
      [&](int pack, const auto& x_values, const auto& dy_values, const auto& weight_values) {
        Compute dx[pack_size];
        gradient.template dx_of_pack<centered>(dx, x_values, dy_values, weight_values);
        call.store.store(row, cols.first_col + Shape::col(pack), dx, added[pack],
                         present && Shape::in_part(pack, cols));
      });
}
