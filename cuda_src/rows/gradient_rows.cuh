// gradient_rows.cuh -- x, dy, weights and an added gradient, which backward keeps in registers
//
// If registers allow, the next row is fetched while the present one is computed.
#pragma once
#include "backward.cuh"
#include "register_row.cuh"

template <class LoadX, class LoadDy, class LoadWeight, class StoreDx, Gradients gradients,
          bool centered, Tile tile>
struct GradientRows {
  using Compute = typename LoadX::Compute;
  using Call = Backward<LoadX, LoadDy, LoadWeight, StoreDx>;

  static constexpr bool in_bundle = tile.path == Path::bundle;
  // Packs of 16-bit elements leave registers for a second row. Packs of 32 bits and single elements
  // do not.
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

  // Unpacks the weights of a pack.
  __device__ __forceinline__ void unpack_weights(int pack, Compute (&values)[tile.pack_size]) {
    // If something is added to dx, there are no registers for unpacked weights.
    constexpr bool stays_packed = in_bundle || LoadWeight::stays_packed || StoreDx::adds;
    if constexpr (needs_weights) weights.unpack(pack, values, 1.0f, stays_packed);
  }

  // Starts the loads of a row. Beyond the last row it loads the last one again, which the caller
  // then ignores.
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
