// reduce_matrix -- sums over rows of a matrix, or its largest magnitude; a block owns some columns
// owns:  threads_per_row neighbouring packs of columns of rows_of_slab rows. Each of rows_per_block
//        groups of threads takes every rows_per_block-th row, packs_per_thread of them at once
// moves: x once in. For sums, one sum a column and slab out, which backward_parameters.cu adds up
// takes: any matrix
// needs: num_cols and row strides multiples of pack_size, addresses aligned to a pack; for sums,
//        shared memory for a pack of sums a thread
#include "load.cuh"
#include "scales.cuh"

// The rows and columns of a block. Blocks with neighbouring numbers share the rows.
template <Tile tile>
struct Slab {
  static constexpr int num_groups = tile.rows_per_block;
  static constexpr int step = tile.packs_per_thread * num_groups;
  static constexpr int num_cols = tile.threads_per_row * tile.pack_size;

  long long index;      // of the rows
  long long first_col;  // of the block
  long long first_row, end_row;
  int group, own_col;  // of this thread; own_col from first_col on

  __device__ __forceinline__ Slab(long long rows, long long cols, long long rows_of_slab) {
    const long long blocks_across = (cols + num_cols - 1) / num_cols;
    index = blockIdx.x / blocks_across;
    first_col = blockIdx.x % blocks_across * num_cols;
    first_row = index * rows_of_slab;
    end_row = min(first_row + rows_of_slab, rows);
    group = threadIdx.x / tile.threads_per_row;
    own_col = threadIdx.x % tile.threads_per_row * tile.pack_size;
  }
  __device__ __forceinline__ long long col() const { return first_col + own_col; }
};

template <class X>
struct ReduceMatrix {
  Load<X> x;
  long long num_rows;
  long long num_cols;
  long long rows_of_slab;
  void* partial_sums;  // [slabs, num_cols] in the arithmetic's type, if sums are wanted
  unsigned* amax;      // else the bits of a float, raised to the largest magnitude
};

template <class X, bool has_sums, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    reduce_matrix(const ReduceMatrix<X> call) {
  using Compute = typename ComputeOf<X>::type;
  constexpr int pack_size = tile.pack_size;
  using Rows = Slab<tile>;
  const Rows slab(call.num_rows, call.num_cols, call.rows_of_slab);

  [[maybe_unused]] Compute sums[pack_size] = {};
  [[maybe_unused]] Largest largest{};
  if (slab.col() < call.num_cols) {
#pragma unroll 1
    for (long long row = slab.first_row + slab.group; row < slab.end_row; row += Rows::step) {
      Pack<X, pack_size> packs[tile.packs_per_thread];
#pragma unroll
      for (int at = 0; at < tile.packs_per_thread; ++at) {
        packs[at] = {};
        const long long own = row + at * Rows::num_groups;
        if (own < slab.end_row) packs[at] = call.x.template load<pack_size>(own, slab.col());
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
        static_cast<Compute*>(call.partial_sums) + slab.index * call.num_cols + slab.first_col;
    add_groups<Rows::num_cols, Rows::num_groups>(reinterpret_cast<Compute*>(dynamic_smem()), sums,
                                                 slab.group, slab.own_col, total,
                                                 call.num_cols - slab.first_col);
  } else {
    raise_amax(call.amax, warp_reduce<32>(largest).bits());
  }
}
