// forward_warp -- y = (x - mean) * rstd * weight + bias; a warp, or 2 to 16 lanes of one, owns a row
// owns:  each lane keeps packs_per_thread packs of its row in registers; a block works on rows_per_block rows at a time
// moves: x once in, y once out: num_cols * (itemsize of x + itemsize of y) bytes a row
// takes: num_cols <= pack_size * threads_per_row * packs_per_thread; wider rows: forward_block.cu
// needs: num_cols and all row strides multiples of pack_size, addresses aligned to a pack; whole warps in a block;
//        in bundles: rows without gaps, x and y of one size, shared memory for the images
#include "bundle.cuh"
#include "forward.cuh"

// The same, of rows that come and go in bundles. streams: of the load, one or two.
template <class Load, class Store, bool centered, Statistics statistics, Tile tile, class... Streamed>
__device__ __forceinline__ void forward_bundles(const Forward<Load, Store>& problem, unsigned char* smem,
                                                const BundleStream<tile, Streamed>&... streams) {
  using Compute = typename Load::Compute;
  using X = typename Load::Held;
  constexpr bool sums_up = sizeof...(Streamed) == 2;
  constexpr int pack_size = tile.pack_size;
  using Parts = BundleParts<tile>;
  const int num_cols = static_cast<int>(problem.num_cols);
  const BundleStream<tile, X> of_row[] = {streams...};
  const Bundles<tile, Streamed...> bundles(smem, problem.num_rows, streams...);
  WarpReduce<tile.threads_per_row> reduce;
  const auto col_of = [&](int pack) {
    return pack < tile.packs_per_thread && register_pack_in_row<tile>(pack, num_cols) ? register_col<tile>(pack) : 0;
  };
  typename Store::template Kept<2 * pack_size> kept[(tile.packs_per_thread + 1) / 2];
#pragma unroll
  for (int pack = 0; pack < tile.packs_per_thread; pack += 2) {
    kept[pack / 2] = problem.store.template keep_two<pack_size>(col_of(pack), col_of(pack + 1));
  }
  const auto take = [&](const unsigned char* slot, int part, long long first_row, int num_rows, int turns) {
    const X* rows[sizeof...(Streamed)];
#pragma unroll
    for (int at = 0; at < static_cast<int>(sizeof...(Streamed)); ++at) {
      rows[at] = of_row[at].in(slot + at * of_row[at].slot_bytes(), part, first_row);
    }
    Store store = problem.store;
    auto* const y = store.written() + first_row * num_cols;
    auto* const results = result_image(reinterpret_cast<decltype(y)>(const_cast<X*>(rows[0])), y);
    X *sum = nullptr, *sums = nullptr;  // which take the place of the residual
    if constexpr (sums_up) {
      sum = problem.load.sum + first_row * num_cols;
      sums = result_image(rows[1], sum);
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int row = turn * Parts::rows_at_once + Parts::first_row();
      const bool present = row < num_rows;
      const int own = (present ? row : max(num_rows - 1, 0)) * num_cols + register_col<tile>(0);
      RegisterRow<Load, tile> values;
      if constexpr (sums_up) {
        values.fetch_own({rows[0] + own, rows[1] + own}, {0, num_cols});
      } else {
        values.fetch_own({rows[0] + own}, {0, num_cols});
      }
      const auto found = row_statistics<centered, statistics, Compute>(values, reduce, num_cols, problem.eps);
      problem.save(first_row + row, found, present && threadIdx.x % tile.threads_per_row == 0);
      store.written() = results + own;
      __syncwarp();  // all have read what results may take the place of
      if constexpr (sums_up) values.leave_own(sums + own, present);
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        if (pack % 2 == 0) kept[pack / 2].forget_unpacked();
        auto of_two = kept[pack / 2];
        of_two.await(__float_as_uint(found.rstd) >> 31);
        Compute weights[2 * pack_size], biases[2 * pack_size];
        of_two.weight.unpack_to(weights, 1.0f);
        of_two.bias.unpack_to(biases, 0.0f);
        Compute of_row[pack_size], normalized[pack_size], own_weights[pack_size], own_biases[pack_size];
        unpack(values.packs[pack], of_row);
        found.template normalize<centered>(of_row, normalized);
#pragma unroll
        for (int at = 0; at < pack_size; ++at) {
          own_weights[at] = weights[pack % 2 * pack_size + at];
          own_biases[at] = biases[pack % 2 * pack_size + at];
        }
        store.store(0, pack * tile.threads_per_row * pack_size, normalized, own_weights, own_biases,
                    present && register_pack_in_row<tile>(pack, num_cols));
      }
    }
    __syncwarp();
    write_image<Parts::lanes>(y, results, num_rows * num_cols);
    if constexpr (sums_up) {
      if (problem.load.sum != nullptr) write_image<Parts::lanes>(sum, sums, num_rows * num_cols);
    }
  };
  bundles.for_each(take, streams...);
}

template <class Load, class Store, bool centered, Statistics statistics, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) forward_warp(const Forward<Load, Store> problem) {
  using Compute = typename Load::Compute;
  if constexpr (tile.bundle > 0) {
    const auto stream = [&](int index) {
      return BundleStream<tile, typename Load::Held>{problem.load.row_start(0, index), static_cast<int>(problem.num_cols)};
    };
    if constexpr (Load::num_streams == 2) {
      forward_bundles<Load, Store, centered, statistics, tile>(problem, dynamic_smem(), stream(0), stream(1));
    } else {
      forward_bundles<Load, Store, centered, statistics, tile>(problem, dynamic_smem(), stream(0));
    }
    return;
  }
  auto carried = problem.template start<tile>();
  WarpReduce<tile.threads_per_row> reduce;
  const long long step = static_cast<long long>(gridDim.x) * tile.rows_per_block;

  for (long long first = static_cast<long long>(blockIdx.x) * tile.rows_per_block; first < problem.num_rows; first += step) {
    const long long row = first + threadIdx.x / tile.threads_per_row;
    // Lanes beyond the last row take part in the shuffles of their warp with a row that others own, and write nothing.
    const bool present = row < problem.num_rows;
    RegisterRow<Load, tile> values;
    values.fetch(problem.load, present ? row : problem.num_rows - 1, {0, static_cast<int>(problem.num_cols)});
    const auto found = row_statistics<centered, statistics, Compute>(values, reduce, problem.num_cols, problem.eps);
    problem.template write<centered>(row, values, found, reduce, threadIdx.x % tile.threads_per_row == 0, carried, present);
  }
  problem.finish(carried);
}
