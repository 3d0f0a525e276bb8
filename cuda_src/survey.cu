// survey -- sums over rows of a matrix, or its largest magnitude; a block owns columns of a slab
// owns:  threads_per_row neighbouring packs of columns of rows_of_slab rows. Each of rows_per_block
//        groups of threads takes every rows_per_block-th row, packs_per_thread of them at once
// moves: x once in. For sums, one sum a column and slab out, which backward_parameters.cu adds up
// takes: any matrix
// needs: num_cols and row strides multiples of pack_size, addresses aligned to a pack; for sums,
//        shared memory for a pack of sums a thread
#include "amax.cuh"
#include "column_sums.cuh"
#include "load.cuh"

template <class X>
struct Survey {
  Load<X> x;
  long long num_rows;
  long long num_cols;
  long long rows_of_slab;
  void* partial_sums;  // [slabs, num_cols] in the arithmetic's type, if sums are wanted
  unsigned* amax;      // else the bits of a float, raised to the largest magnitude
};

template <class X, bool has_sums, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    survey(const Survey<X> problem) {
  using Compute = typename ComputeOf<X>::type;
  constexpr int pack_size = tile.pack_size, num_groups = tile.rows_per_block,
                block_cols = tile.threads_per_row * pack_size;
  const long long blocks_across = (problem.num_cols + block_cols - 1) / block_cols;
  const long long slab = blockIdx.x / blocks_across,
                  first_col = blockIdx.x % blocks_across * block_cols;
  const long long first_row = slab * problem.rows_of_slab;
  const long long end = min(first_row + problem.rows_of_slab, problem.num_rows);
  const int group = threadIdx.x / tile.threads_per_row,
            own_col = threadIdx.x % tile.threads_per_row * pack_size;
  const long long col = first_col + own_col;

  [[maybe_unused]] Compute sums[pack_size] = {};
  [[maybe_unused]] Largest largest{};
  if (col < problem.num_cols) {
#pragma unroll 1
    for (long long row = first_row + group; row < end; row += tile.packs_per_thread * num_groups) {
      Pack<X, pack_size> packs[tile.packs_per_thread];
#pragma unroll
      for (int at = 0; at < tile.packs_per_thread; ++at) {
        packs[at] = {};
        const long long own = row + at * num_groups;
        if (own < end) packs[at] = problem.x.template load<pack_size>(own, col);
      }
#pragma unroll
      for (const auto& pack : packs) {
        Compute values[pack_size];
        unpack(pack, values);
        if constexpr (has_sums) {
#pragma unroll
          for (int at = 0; at < pack_size; ++at) sums[at] += values[at];
        } else {
          largest.add_pack(values);
        }
      }
    }
  }
  if constexpr (has_sums) {
    Compute* total =
        static_cast<Compute*>(problem.partial_sums) + slab * problem.num_cols + first_col;
    add_groups<block_cols, num_groups>(reinterpret_cast<Compute*>(dynamic_smem()), sums, group,
                                       own_col, total, problem.num_cols - first_col);
  } else {
    raise_amax(problem.amax, warp_reduce<32>(largest).bits());
  }
}
