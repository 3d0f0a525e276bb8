// split_gradients -- dx, partial sums of dweight and dbias, of one rank; a block owns a slab
// owns:  a slab is threads_per_row neighbouring packs of columns of rows_of_slab rows. Each of
//        rows_per_block groups of threads takes every rows_per_block-th row, packs_per_thread of
//        them at once. The sums of whole rows come from split_sums.cu, added over the ranks
// moves: x and dy once in, dx once out; a sum a column and slab, which backward_parameters.cu adds
// takes: any part of at least one column
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; shared
//        memory for a pack of sums a thread
#include "backward.cuh"
#include "column_sums.cuh"
#include "slab.cuh"
#include "split_rows.cuh"

template <class X, class Dy, class LoadWeight, bool centered>
struct SplitGradients {
  using Compute = typename Load<X>::Compute;
  Load<X> x;
  Load<Dy> dy;
  LoadWeight load_weight;
  DxStore<X, void> dx;
  SavedStatistics<Compute, centered> saved;
  const Compute* sums;        // over all ranks, else as in split_sums.cu
  Compute* dweight_partials;  // [slabs, num_cols]
  Compute* dbias_partials;
  long long num_rows;
  long long num_cols;
  long long rows_of_slab;
  long long cols_of_row;

  // Everything about a row but its x and dy.
  template <bool needs_sums>
  __device__ __forceinline__ RowGradient<Compute, true> gradient_of(long long row,
                                                                    Compute rstd) const {
    RowGradient<Compute, true> gradient{};
    gradient.rstd = rstd;
    if constexpr (needs_sums) {
      const Sum<Compute, 2> of_row{{sums[row], centered ? sums[num_rows + row] : Compute(0)}};
      gradient.finish(of_row, Compute(1) / static_cast<Compute>(cols_of_row));
    }
    return gradient;
  }
};

template <class X, class Dy, class LoadWeight, Gradients gradients, bool centered, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    split_gradients(const SplitGradients<X, Dy, LoadWeight, centered> call) {
  using Compute = typename Load<X>::Compute;
  constexpr int pack_size = tile.pack_size;
  using Rows = Slab<tile>;
  const Rows slab(call.num_rows, call.num_cols, call.rows_of_slab);
  const long long col = slab.col();

  Compute dweights[pack_size] = {}, dbiases[pack_size] = {};
  if (col < call.num_cols) {
    auto kept = call.load_weight.template keep<pack_size>(col);
#pragma unroll 1
    for (long long row = slab.first_row + slab.group; row < slab.end_row; row += Rows::step) {
      Pack<X, pack_size> x_packs[tile.packs_per_thread];
      Pack<Dy, pack_size> dy_packs[tile.packs_per_thread];
#pragma unroll
      for (int at = 0; at < tile.packs_per_thread; ++at) {
        const long long own = min(row + at * Rows::num_groups, slab.end_row - 1);
        x_packs[at] = call.x.template load<pack_size>(own, col);
        dy_packs[at] = call.dy.template load<pack_size>(own, col);
      }
#pragma unroll
      for (int at = 0; at < tile.packs_per_thread; ++at) {
        const long long own = row + at * Rows::num_groups;
        if (own >= slab.end_row) break;
        const auto statistics = call.saved.load(own, call.num_rows);
        const auto gradient = call.template gradient_of<gradients.dx>(own, statistics.rstd);
        Compute xs[pack_size], x_hats[pack_size], dys[pack_size], weights[pack_size];
        unpack(x_packs[at], xs);
        unpack(dy_packs[at], dys);
        if constexpr (LoadWeight::stays_packed) kept.forget_unpacked();
        LoadWeight::unpack(kept, weights);
        statistics.template normalize<centered>(xs, x_hats);
        Compute dx[pack_size];
#pragma unroll
        for (int element = 0; element < pack_size; ++element) {
          const Compute value = dys[element], x_hat = x_hats[element];
          if constexpr (gradients.dweight) dweights[element] += value * x_hat;
          if constexpr (gradients.dbias) dbiases[element] += value;
          dx[element] =
              gradient.template dx<centered>(x_hat, rounded_product(value, weights[element]));
        }
        if constexpr (gradients.dx) call.dx.store(own, col, dx, {}, true);
      }
    }
  }
  auto* of_groups = reinterpret_cast<Compute*>(dynamic_smem());
  const auto write = [&](const Compute(&sums)[pack_size], Compute* partials) {
    add_groups<Rows::num_cols, Rows::num_groups>(
        of_groups, sums, slab.group, slab.own_col,
        partials + slab.index * call.num_cols + slab.first_col, call.num_cols - slab.first_col);
    __syncthreads();  // before of_groups is used again
  };
  if constexpr (gradients.dweight) write(dweights, call.dweight_partials);
  if constexpr (gradients.dbias) write(dbiases, call.dbias_partials);
}
