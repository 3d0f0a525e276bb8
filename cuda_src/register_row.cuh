// register_row.cuh -- a row, or one block's slice of it, in registers: packs_per_thread packs in
// each thread
//
// The packs keep the type that holds the row exactly; each pass unpacks them. The members are those
// of every row (uncached_row.cuh). NextRow fetches the next row while the present one is written.
#pragma once
#include "convert.cuh"
#include "register_budget.cuh"
#include "slice.cuh"
#include "tile.cuh"

// Where pack `pack` of this thread begins in its block's columns. Neighbouring threads take
// neighbouring packs.
template <Tile tile>
__device__ __forceinline__ int register_col(int pack) {
  // An unsigned remainder lets the compiler derive the addresses of all packs from one. A signed
  // one gives each pack its own address: faster for single elements, and it saves registers where a
  // row does not fill its lanes. If a block has one row, a power of two makes the remainder a mask.
  constexpr bool is_signed = tile.pack_size == 1 || (tile.rows_per_block > 1 && !tile.exact);
  constexpr int divisor =
      tile.rows_per_block > 1 ? tile.threads_per_row : power_of_two_from(tile.threads_per_row);
  const int thread = is_signed ? static_cast<int>(threadIdx.x) % tile.threads_per_row
                               : static_cast<int>(threadIdx.x % divisor);
  return (pack * tile.threads_per_row + thread) * tile.pack_size;
}

// Only a thread's last pack can lie beyond the block's columns, and none if the columns fill the
// tile.
template <Tile tile>
__device__ __forceinline__ bool register_pack_in_row(int pack, int num_cols) {
  if constexpr (tile.exact) return true;
  return pack < tile.packs_per_thread - 1 || register_col<tile>(pack) < num_cols;
}

// A float sum of so many values of one magnitude is exact: it is less than 2^24 times their last
// bit.
template <class Held>
constexpr int most_exact_cols = is_same<Held, __nv_bfloat16> ? 1 << 16
                                : is_same<Held, __half>      ? 1 << 13
                                                             : 0;

template <class Load, Tile tile>
struct RegisterRow {
  using Compute = typename Load::Compute;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int threads_per_row = tile.threads_per_row;
  static constexpr bool has_exact_sums =
      tile.cols() * tile.cluster_size <= most_exact_cols<typename Load::Held>;
  static constexpr int num_summed_packs =
      tile.threads_per_row <= 32 && tile.pack_size > 1 && tile.path != Path::bundle
          ? tile.packs_per_thread
          : 0;
  using Budget = RegisterBudget<typename Load::Held, Compute, tile>;
  static constexpr int num_kept_results = Budget::num_kept_results;
  static constexpr bool has_spare_registers = Budget::has_spare_registers;
  static constexpr bool is_tight = Budget::is_tight;
  static constexpr bool has_room_for_next = Budget::has_room_for_next;

  Pack<typename Load::Held, tile.pack_size> packs[tile.packs_per_thread];
  Slice cols;

  // Starts all loads before the first use, so that they are in flight together. A pack beyond the
  // row loads the first pack again.
  __device__ __forceinline__ void fetch(const Load& load, long long row, Slice columns) {
    cols = columns;
    if constexpr (Load::has_effect) {
      typename Load::template Begun<tile.pack_size> begun[tile.packs_per_thread];
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack)
        begun[pack] = load.template begin<tile.pack_size>(row, col(pack));
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        packs[pack] =
            load.finish(row, col(pack), begun[pack], register_pack_in_row<tile>(pack, cols.size()));
      }
    } else {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        packs[pack] = load.template load<tile.pack_size>(row, col(pack));
      }
    }
  }

  // The same from `own`, where this thread's first pack lies in each stream of the load. The other
  // packs are constants away.
  template <int num_streams>
  __device__ __forceinline__ void fetch_own(const typename Load::Held* const (&own)[num_streams],
                                            Slice columns) {
    cols = columns;
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const bool in_row = register_pack_in_row<tile>(pack, cols.size());
      const int otherwise = tile.packs_per_thread > 1 ? 0 : -register_col<tile>(0);
      const int from = in_row ? pack * tile.threads_per_row * tile.pack_size : otherwise;
      Pack<typename Load::Held, tile.pack_size> loaded[num_streams];
#pragma unroll
      for (int stream = 0; stream < num_streams; ++stream)
        loaded[stream] = load_pack<tile.pack_size>(own[stream] + from);
      packs[pack] = Load::combine(loaded);
    }
  }

  // Writes the row back, to the same places from `own`.
  __device__ __forceinline__ void store_own(typename Load::Held* own, bool present) const {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (present && register_pack_in_row<tile>(pack, cols.size())) {
        store_pack<tile.pack_size>(own + pack * tile.threads_per_row * tile.pack_size, packs[pack]);
      }
    }
  }

  // Where a pack of this thread begins: a constant away from its first pack, so that one address
  // serves all.
  __device__ __forceinline__ long long col_of(int pack) const {
    return cols.first_col + register_col<tile>(0) +
           static_cast<long long>(pack * (tile.cols() / tile.packs_per_thread));
  }

  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (register_pack_in_row<tile>(pack, cols.size())) {
        Compute values[tile.pack_size];
        unpack(packs[pack], values);
        f(col_of(pack), values);
      }
    }
    forget();
  }
  template <class F>
  __device__ __forceinline__ void for_each_col(F f) const {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack)
      f(col_of(pack), register_pack_in_row<tile>(pack, cols.size()));
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_padded(F f) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const bool in_row = register_pack_in_row<tile>(pack, cols.size());
      Compute values[tile.pack_size];
      unpack(packs[pack], values);
      f(col_of(pack), values, in_row);
    }
    forget();
  }
  template <class LoadMore, class F>
  __device__ __forceinline__ void for_each_pack_with(LoadMore load_more, F f) {
    constexpr int ahead = Budget::template packs_ahead<sizeof(load_more(0)) / 4>();
    decltype(load_more(0)) loaded[tile.packs_per_thread];
#pragma unroll
    for (int pack = 0; pack < ahead; ++pack) loaded[pack] = load_more(col(pack));
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (pack + ahead < tile.packs_per_thread) loaded[pack + ahead] = load_more(col(pack + ahead));
      Compute values[tile.pack_size];
      unpack(packs[pack], values);
      f(col_of(pack), values, register_pack_in_row<tile>(pack, cols.size()), loaded[pack]);
    }
    forget();
  }

 private:
  // Where a pack is loaded from: for a pack beyond the row, the first column.
  __device__ __forceinline__ long long col(int pack) const {
    return register_pack_in_row<tile>(pack, cols.size()) ? col_of(pack) : cols.first_col;
  }
  __device__ __forceinline__ void forget() {
    if constexpr (Budget::unpack_each_pass) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) forget_unpacked(packs[pack]);
    }
  }
};

// The row that a thread works on next. fetch() loads it into the same registers while the results
// of the present row are written. After the last row it is the last row again: a condition would
// take registers.
template <class Load, Tile tile>
struct NextRow {
  const Load& load;
  RegisterRow<Load, tile>& values;
  long long row;

  __device__ __forceinline__ NextRow(const Load& load, RegisterRow<Load, tile>& values,
                                     long long row, long long num_rows)
      : load(load), values(values), row(min(row, num_rows - 1)) {}
  __device__ __forceinline__ void fetch() const { values.fetch(load, row, values.cols); }
};
