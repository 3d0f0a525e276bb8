// register_row.cuh -- a row, or one block's slice of it, in the registers of threads
//
// Each thread has packs_per_thread packs, in the type that holds the row exactly; each pass unpacks
// them. The members are those of every row (uncached_row.cuh).
#pragma once
#include "tile.cuh"

// What fits the registers of a thread beside a row that it keeps. With these limits nothing spills:
// a test compiles the kernels.
template <class Held, class Compute, Tile tile>
struct RegisterBudget {
  static constexpr int elements = tile.pack_size * tile.packs_per_thread;
  // A quarter of a multiprocessor has 512 registers for each lane of its warps.
  static constexpr int registers =
      512 / ((tile.blocks_per_sm * tile.block_size() + 127) / 128) / 8 * 8;

  // Whether the row is unpacked in each pass, because it fits the registers only as packs.
  static constexpr int most_unpacked = tile.blocks_per_sm * tile.block_size() <= 512 ? 64 : 32;
  static constexpr bool unpack_each_pass = elements > most_unpacked;

  // Packs of results in the compute type that can be kept too: all, or 0. The limit of 320 bytes is
  // that of cupynorm/dispatch/abilities.py.
  static constexpr int num_kept_results =
      tile.cols() / tile.threads_per_row * sizeof(Compute) > 320 ? 0 : tile.packs_per_thread;
  // Beside such results: whether a second maximum fits; whether the one-instruction maximum of a
  // warp does not; whether the next row fits.
  static constexpr bool has_spare_registers = registers >= elements + elements / 2 + 8;
  static constexpr bool is_tight = registers < 96 && !has_spare_registers;
  static constexpr bool has_room_for_next =
      registers >= elements + elements / 2 + 32 + 8 * !tile.exact;

  // How many packs ahead a thread loads loaded_words words a pack, such as weights: 1 or 0. needed:
  // its registers with one ahead, 12 of them to test for the end of the row. Narrow rows lack
  // warps, not loads in flight.
  template <int loaded_words>
  static constexpr int packs_ahead() {
    constexpr int of_threads = 65536 / (tile.blocks_per_sm * tile.block_size()) / 8 * 8;
    constexpr int needed =
        elements + loaded_words + (sizeof(Held) > 2 ? 33 : 24) + 12 * !tile.exact;
    constexpr bool is_tight_packed =
        elements > 40 && of_threads < 128 && loaded_words <= tile.pack_size;
    constexpr bool has_no_room =
        sizeof(Compute) > 4 || (unpack_each_pass ? is_tight_packed : of_threads < needed);
    return has_no_room || tile.cols() < 128 ? 0 : 1;
  }
};

template <class Load, Tile tile>
struct RegisterRow : RegisterBudget<typename Load::Held, typename Load::Compute, tile> {
  using Budget = RegisterBudget<typename Load::Held, typename Load::Compute, tile>;
  using Held = typename Load::Held;
  using Compute = typename Load::Compute;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int num_packs = tile.packs_per_thread;
  static constexpr int threads_per_row = tile.threads_per_row;
  static constexpr bool has_exact_sums = tile.cols() * tile.cluster_size <= most_exact_cols<Held>;
  static constexpr bool adds_equals_exactly =
      sizeof(Held) == 2 && tile.cols() * tile.cluster_size <= pack_size << 13;
  static constexpr int num_summed_packs =
      tile.threads_per_row <= 32 && tile.pack_size > 1 && tile.path != Path::bundle ? num_packs : 0;
  static constexpr int cols_apart = tile.threads_per_row * pack_size;  // from pack to pack

  Pack<Held, pack_size> packs[num_packs];
  Slice cols;

  // Starts all loads before the first use, so that they are in flight together. A pack beyond the
  // row loads the first pack again. present: false where another thread loads the same, whose
  // effect is not repeated.
  __device__ __forceinline__ void fetch(const Load& load, long long row, Slice columns,
                                        bool present = true) {
    cols = columns;
    if constexpr (Load::has_effect) {
      typename Load::template Begun<pack_size> begun[num_packs];
#pragma unroll
      for (int pack = 0; pack < num_packs; ++pack)
        begun[pack] = load.template begin<pack_size>(row, col(pack));
#pragma unroll
      for (int pack = 0; pack < num_packs; ++pack)
        packs[pack] = load.finish(row, col(pack), begun[pack], present && in_row(pack));
    } else {
#pragma unroll
      for (int pack = 0; pack < num_packs; ++pack)
        packs[pack] = load.template load<pack_size>(row, col(pack));
    }
  }
  // The same from `own`, where this thread's first pack lies in each stream of the load. The other
  // packs are constants away.
  template <int num_streams>
  __device__ __forceinline__ void fetch_own(const Held* const (&own)[num_streams], Slice columns) {
    cols = columns;
#pragma unroll
    for (int pack = 0; pack < num_packs; ++pack) {
      // Beyond the row: the thread's first pack, or the row's first if the thread has one alone.
      const int otherwise = num_packs > 1 ? 0 : -register_col<tile>(0);
      const int from = in_row(pack) ? pack * cols_apart : otherwise;
      Pack<Held, pack_size> loaded[num_streams];
#pragma unroll
      for (int stream = 0; stream < num_streams; ++stream)
        loaded[stream] = load_pack<pack_size>(own[stream] + from);
      packs[pack] = Load::combine(loaded);
    }
  }
  // Writes the row back, to the same places from `own`.
  __device__ __forceinline__ void store_own(Held* own, bool present) const {
#pragma unroll
    for (int pack = 0; pack < num_packs; ++pack) {
      if (present && in_row(pack)) store_pack<pack_size>(own + pack * cols_apart, packs[pack]);
    }
  }

  __device__ __forceinline__ bool in_row(int pack) const {
    return register_pack_in_row<tile>(pack, cols.size());
  }
  // Where a pack of this thread begins: a constant away from its first pack, so that one address
  // serves all.
  __device__ __forceinline__ long long col_of(int pack) const {
    return cols.first_col + register_col<tile>(0) + static_cast<long long>(pack * cols_apart);
  }
  // Where a pack is loaded from: for a pack beyond the row, the first column.
  __device__ __forceinline__ long long col(int pack) const {
    return in_row(pack) ? col_of(pack) : cols.first_col;
  }

  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) {
    for_each_pack_padded([&](long long col, const auto& values, bool in_row) {
      if (in_row) f(col, values);
    });
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_padded(F f) {
    const auto nothing = [](long long) { return Nothing{}; };
    for_each_pack_with(nothing, [&](long long col, const auto& values, bool in_row, Nothing) {
      f(col, values, in_row);
    });
  }
  template <class LoadMore, class F>
  __device__ __forceinline__ void for_each_pack_with(LoadMore load_more, F f) {
    constexpr int ahead = Budget::template packs_ahead<sizeof(load_more(0)) / 4>();
    decltype(load_more(0)) loaded[num_packs];
#pragma unroll
    for (int pack = 0; pack < ahead; ++pack) loaded[pack] = load_more(col(pack));
#pragma unroll
    for (int pack = 0; pack < num_packs; ++pack) {
      if (pack + ahead < num_packs) loaded[pack + ahead] = load_more(col(pack + ahead));
      Compute values[pack_size];
      unpack(packs[pack], values);
      f(col_of(pack), values, in_row(pack), loaded[pack]);
    }
    if constexpr (Budget::unpack_each_pass) {
#pragma unroll
      for (int pack = 0; pack < num_packs; ++pack) forget_unpacked(packs[pack]);
    }
  }
  // f(col, in_row) for each pack.
  template <class F>
  __device__ __forceinline__ void for_each_col(F f) const {
#pragma unroll
    for (int pack = 0; pack < num_packs; ++pack) f(col_of(pack), in_row(pack));
  }
};
