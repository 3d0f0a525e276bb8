// register_budget.cuh -- what fits the registers of a thread beside a row that it keeps
//
// With these limits nothing spills: a test compiles the kernels.
#pragma once
#include "tile.cuh"

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
  // that of cupynorm/plan/abilities.py.
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
