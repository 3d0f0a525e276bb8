// backward_smem.cuh -- the path `smem` of backward_cluster.cu: a slice of a row in shared memory
//
// A block keeps its slice of x and dy, and its sums of dweight and dbias over all rows of the
// cluster.
#pragma once
#include "backward.cuh"
#include "cluster_reduce.cuh"
#include "smem_row.cuh"

// sums[...] += values, in shared memory. Only this thread uses the pack.
template <class Compute, int pack_size>
__device__ __forceinline__ void add_pack(Compute* sums, const Compute (&values)[pack_size]) {
  Compute added[pack_size];
  unpack(load_pack<pack_size>(sums), added);
#pragma unroll
  for (int at = 0; at < pack_size; ++at) added[at] += values[at];
  store_pack<pack_size>(sums, repack<Compute>(added));
}

template <Gradients gradients, bool centered, Tile tile, class LoadX, class LoadDy,
          class LoadWeight, class StoreDx>
__device__ __forceinline__ void backward_smem(
    const Backward<LoadX, LoadDy, LoadWeight, StoreDx>& call) {
  using Compute = typename LoadX::Compute;
  using X = typename LoadX::Held;
  using Dy = typename LoadDy::Held;
  constexpr int pack_size = tile.pack_size;
  const int num_cols = static_cast<int>(call.num_cols);
  const Slice cols = slice<tile>(num_cols, cluster_rank());
  const int first_col = cols.first_col;
  const int slice_cols = largest_share<tile.cluster_size, 8 * tile.pack_size>(num_cols);

  unsigned char* smem = dynamic_smem();
  ClusterReduce<tile.threads_per_row, tile.cluster_size, Compute> reduce(smem);
  smem += decltype(reduce)::smem_bytes;
  // The widest type first, so that each array begins aligned to its own packs.
  auto* dweight = reinterpret_cast<Compute*>(smem);
  smem += gradients.dweight ? (slice_cols * sizeof(Compute) + 15) / 16 * 16 : 0;
  auto* dbias = reinterpret_cast<Compute*>(smem);
  smem += gradients.dbias ? (slice_cols * sizeof(Compute) + 15) / 16 * 16 : 0;
  SmemRow<X, Compute, tile> x(smem);
  smem += (slice_cols * sizeof(X) + 15) / 16 * 16;
  SmemRow<Dy, Compute, tile> dy(smem);

  for_each_own_col<tile>(cols, [&](int col) {
    const Compute zeros[pack_size] = {};
    if constexpr (gradients.dweight)
      store_pack<pack_size>(dweight + (col - first_col), repack<Compute>(zeros));
    if constexpr (gradients.dbias)
      store_pack<pack_size>(dbias + (col - first_col), repack<Compute>(zeros));
  });
  cluster_sync();  // a block may write to its peers once they run

  const Compute reciprocal = Compute(1) / static_cast<Compute>(num_cols);
  for (long long row = blockIdx.x / tile.cluster_size; row < call.num_rows;
       row += gridDim.x / tile.cluster_size) {
    x.fetch(call.load_x, row, cols);
    dy.fetch(call.load_dy, row, cols);
    auto gradient = call.template gradient_of<centered>(row);

    Sum<Compute, 2> sums{};
    x.for_each_pack([&](int col, const Compute(&xs)[pack_size]) {
      Compute dys[pack_size], weights[pack_size], biases[pack_size], products[pack_size];
      unpack(load_pack<pack_size>(dy.held + (col - first_col)), dys);
      if constexpr (gradients.dx || StoreDx::recomputes) call.load_weight.load(col, weights);
      if constexpr (StoreDx::recomputes) {
        call.store.load_bias().load(col, biases);
        call.template recompute<centered>(gradient, row, col, xs, weights, biases);
      }
#pragma unroll
      for (int at = 0; at < pack_size; ++at)
        products[at] = dys[at] * gradient.template x_hat<centered>(xs[at]);
      if constexpr (gradients.dx) gradient.template add_to<centered>(sums, xs, dys, weights);
      if constexpr (gradients.dweight) add_pack(dweight + (col - first_col), products);
      if constexpr (gradients.dbias) add_pack(dbias + (col - first_col), dys);
    });
    if constexpr (gradients.dx) {
      gradient.finish(reduce.all(sums), reciprocal);
      x.for_each_pack([&](int col, const Compute(&xs)[pack_size]) {
        Compute dys[pack_size], weights[pack_size], dx[pack_size];
        unpack(load_pack<pack_size>(dy.held + (col - first_col)), dys);
        call.load_weight.load(col, weights);
        gradient.template dx_of_pack<centered>(dx, xs, dys, weights);
        call.store_dx(row, col, dx);
      });
    }
  }

  const long long offset = static_cast<long long>(blockIdx.x / tile.cluster_size) * call.num_cols;
  for_each_own_col<tile>(cols, [&](int col) {
    const auto write = [&](Compute* partials, const Compute* sums) {
      store_pack<pack_size>(partials + offset + col,
                            load_pack<pack_size>(sums + (col - first_col)));
    };
    if constexpr (gradients.dweight) write(call.dweight_partials, dweight);
    if constexpr (gradients.dbias) write(call.dbias_partials, dbias);
  });
}
