// register_row.cuh -- a row, or one block's slice of it, in the registers of threads
//
// Each thread has packs_per_thread packs, in the type that holds the row exactly; each pass unpacks
// them. The members are those of every row (uncached_row.cuh).
#pragma once
#include "register_budget.cuh"
#include "register_packs.cuh"

template <class Load, Tile tile>
struct RegisterRow : RegisterPacks<Load, tile> {
  using Packs = RegisterPacks<Load, tile>;
  using Packs::col, Packs::col_of, Packs::cols, Packs::packs;
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
  __device__ __forceinline__ void forget() {
    if constexpr (Budget::unpack_each_pass) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) forget_unpacked(packs[pack]);
    }
  }
};
