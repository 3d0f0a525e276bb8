// forward_bundle.cuh -- path `bundle` of forward_warp.cu: several rows at once in shared memory
//
// needs: rows without gaps, x and y of one size, a Store, and shared memory for the images
// (bundle.cuh).
#pragma once
#include "bundle.cuh"
#include "forward.cuh"
#include "register_row.cuh"

// streams: the tensors that make up a row, one or two.
template <bool centered, Statistics statistics, Tile tile, class Load, class Store,
          class... Streamed>
__device__ __forceinline__ void forward_bundles(const Forward<Load, Store>& call,
                                                unsigned char* smem,
                                                const BundleStream<tile, Streamed>&... streams) {
  using Compute = typename Load::Compute;
  using X = typename Load::Held;
  using Parts = BundleParts<tile>;
  constexpr int num_streams = sizeof...(Streamed);
  constexpr bool has_sum = num_streams == 2;  // of x and a residual
  constexpr int pack_size = tile.pack_size;
  const int num_cols = static_cast<int>(call.num_cols);
  const BundleStream<tile, X> all_streams[] = {streams...};
  const Bundles<tile, Streamed...> bundles(smem, call.num_rows, streams...);
  WarpReduce<tile.threads_per_row> reduce;

  const auto col_of = [&](int pack) {
    const bool in_row = pack < tile.packs_per_thread && register_pack_in_row<tile>(pack, num_cols);
    return in_row ? register_col<tile>(pack) : 0;
  };
  typename Store::template WeightPairs<pack_size, tile.packs_per_thread> kept_weights;
  typename Store::template BiasPairs<pack_size, tile.packs_per_thread> kept_biases;
  kept_weights.load(call.store.weight, col_of);
  kept_biases.load(call.store.bias, col_of);

  // Rows of one part: from their image, and results over it. Arguments: those of Bundles::for_each.
  const auto work_on = [&](const unsigned char* slot, int part, long long first_row, int num_rows,
                           int num_turns) {
    const X* rows[num_streams];
#pragma unroll
    for (int at = 0; at < num_streams; ++at)
      rows[at] = all_streams[at].in(slot + at * all_streams[at].slot_bytes(), part, first_row);
    Store store = call.store;  // writes to the image
    auto* const y = store.written() + first_row * num_cols;
    auto* const results = result_image(reinterpret_cast<decltype(y)>(const_cast<X*>(rows[0])), y);
    X *sum = nullptr, *sums = nullptr;  // the sums overwrite the residual's image
    if constexpr (has_sum) {
      sum = call.load.sum + first_row * num_cols;
      sums = result_image(rows[1], sum);
    }
#pragma unroll 1
    for (int turn = 0; turn < num_turns; ++turn) {
      const int row = turn * Parts::rows_at_once + Parts::first_row();
      const bool present = row < num_rows;
      const int own = (present ? row : max(num_rows - 1, 0)) * num_cols + register_col<tile>(0);
      RegisterRow<Load, tile> values;
      if constexpr (has_sum) {
        values.fetch_own({rows[0] + own, rows[1] + own}, {0, num_cols});
      } else {
        values.fetch_own({rows[0] + own}, {0, num_cols});
      }
      const auto mean_rstd =
          row_statistics<centered, statistics, Compute>(values, reduce, num_cols, call.eps);
      call.save({first_row + row, threadIdx.x % tile.threads_per_row == 0, present}, mean_rstd);
      store.written() = results + own;
      __syncwarp();  // all lanes have read what the results overwrite
      if constexpr (has_sum) values.store_own(sums + own, present);
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        Compute xs[pack_size], normalized[pack_size], weights[pack_size], biases[pack_size];
        const unsigned int zero = __float_as_uint(mean_rstd.rstd) >> 31;  // rstd has no sign
        kept_weights.unpack(pack, weights, 1.0f, true, zero);
        kept_biases.unpack(pack, biases, 0.0f, true, zero);
        unpack(values.packs[pack], xs);
        mean_rstd.template normalize<centered>(xs, normalized);
        const int own_col = pack * tile.threads_per_row * pack_size;
        const bool is_written = present && register_pack_in_row<tile>(pack, num_cols);
        if constexpr (has_functor<Store>) {
          Compute y_values[pack_size];
          store.affine(normalized, weights, biases, y_values);
          store.template finish<centered>(call, {first_row + row, col_of(pack), is_written},
                                          store.y + own_col, y_values, mean_rstd);
        } else {
          store.store(0, own_col, normalized, weights, biases, is_written);
        }
      }
    }
    __syncwarp();
    write_image<Parts::lanes>(y, results, num_rows * num_cols);
    if constexpr (has_sum) {
      if (call.load.sum != nullptr) write_image<Parts::lanes>(sum, sums, num_rows * num_cols);
    }
  };
  bundles.for_each(work_on, streams...);
}

template <bool centered, Statistics statistics, Tile tile, class Load, class Store>
__device__ __forceinline__ void forward_bundle(const Forward<Load, Store>& call) {
  const auto stream = [&](int index) {
    return BundleStream<tile, typename Load::Held>{call.load.row_start(0, index),
                                                   static_cast<int>(call.num_cols)};
  };
  if constexpr (Load::num_streams == 2) {
    forward_bundles<centered, statistics, tile>(call, dynamic_smem(), stream(0), stream(1));
  } else {
    forward_bundles<centered, statistics, tile>(call, dynamic_smem(), stream(0));
  }
}
