// grid_shape.cuh -- which rows, columns, registers and shared memory a block of path `grid` has
//
// A group of cluster_size blocks shares a row, and each group takes every num_groups-th row. All
// blocks of the launch are resident at once. A block has a slice of each row. The threads of its
// first warps are workers: worker t has packs t, t + num_workers, ... of the slice. They travel
// through `stages` slots of shared memory (grid_turns.cuh). Without slots each row is read twice
// (grid_twice.cuh). The other warps exchange sums (grid_exchange.cuh).
#pragma once
#include "slice.cuh"

template <Tile tile>
struct GridShape {
  static constexpr int num_blocks = tile.cluster_size;
  static constexpr int num_exchangers = 4;
  static constexpr int num_warps = tile.threads_per_row / 32 - num_exchangers;  // that work
  static constexpr int num_workers = 32 * num_warps;
  static constexpr int step = num_workers * tile.pack_size;
  static constexpr int num_packs = tile.packs_per_thread;  // of a row that a worker has
  static constexpr int num_slots = tile.stages;

  // Packs that a worker takes in one step; a slot has those of one step. Few warps need more.
  static constexpr int packs_at_once = num_warps <= 8 ? 2 : 1;
  static constexpr int num_steps = num_packs / packs_at_once;  // of a row

  // A worker writes packs `lag` steps after it has summed them: the sums of their row must travel
  // between the blocks first. The packs of the next in_flight steps are on their way to shared
  // memory. So there are lag + 1 + in_flight slots.
  static constexpr bool keeps_rows = tile.stages > 0;
  static constexpr int most_lag = 6 * num_steps;  // six turns
  static constexpr int clamp(int value, int least, int most) {
    return value < least ? least : value > most ? most : value;
  }
  // The lag is three turns, but leaves at least an eighth of the slots to copies in flight, and at
  // most a quarter. In any case it is one to six turns.
  static constexpr int lag_of_quarter = tile.stages - 1 - clamp(tile.stages / 4, 1, 64);
  static constexpr int lag_of_eighth = tile.stages - 1 - clamp(tile.stages / 8, 1, 64);
  static constexpr int wanted_lag = clamp(3 * num_steps, lag_of_quarter, lag_of_eighth);
  static constexpr int lag = clamp(wanted_lag, num_steps, most_lag);
  static constexpr int in_flight = tile.stages - 1 - lag;
  static constexpr int turns_behind =
      keeps_rows ? (lag + num_steps - 1) / num_steps : num_exchangers;
  static_assert(!keeps_rows || (in_flight > 0 && num_packs % packs_at_once == 0));

  // How many steps prefetches to the L2 cache are ahead of copies: those of 24 KB, or one. Rows
  // that wait for their sums leave little shared memory for copies in flight.
  static constexpr int steps_ahead(int place_bytes) {
    return clamp(24 * 1024 / (packs_at_once * place_bytes), 1, 64);
  }

  // Registers of a thread. Four warps that exchange give some of theirs to those that work.
  static constexpr int num_warpgroups = (num_warps + num_exchangers + 3) / 4;
  static constexpr int at_first = 512 / num_warpgroups / 8 * 8, exchanger_registers = 56;
  static constexpr int after_gift = (at_first * num_warpgroups - exchanger_registers) /
                                    (num_warpgroups > 1 ? num_warpgroups - 1 : 1) / 8 * 8;
  static constexpr bool gives_registers =
      num_warps % 4 == 0 && num_warps >= 8 && after_gift > at_first;
  static constexpr int worker_registers = gives_registers ? after_gift : at_first;
  // For what a thread keeps from row to row: all but those for one step.
  static constexpr int spare_registers = worker_registers - (packs_at_once == 2 ? 96 : 80);
  static constexpr int smem_bytes = 227 * 1024;

  // Step `step` of a turn.
  struct Step {
    long long turn;
    int step;

    // The step `distance` steps later; earlier, if that is negative.
    __device__ __forceinline__ Step later(int distance) const {
      const int turns_back = distance < 0 ? (num_steps - 1 - distance) / num_steps : 0;
      const int from = step + distance + turns_back * num_steps;
      return {turn - turns_back + from / num_steps, from % num_steps};
    }
  };

  __device__ __forceinline__ static bool works() { return threadIdx.x < num_workers; }
  __device__ __forceinline__ static unsigned rank() { return blockIdx.x % num_blocks; }
  __device__ __forceinline__ static unsigned group() { return blockIdx.x / num_blocks; }
  __device__ __forceinline__ static unsigned num_groups() { return gridDim.x / num_blocks; }
  __device__ __forceinline__ static long long row(long long turn) {
    return group() + turn * num_groups();
  }
  __device__ __forceinline__ static long long num_turns(long long num_rows) {
    return (num_rows - group() + num_groups() - 1) / num_groups();
  }
  __device__ __forceinline__ static Slice cols(long long num_cols) {
    return slice<tile>(static_cast<int>(num_cols), rank());
  }
  // Where a pack of this thread begins in the slice.
  __device__ __forceinline__ static int col(int pack) {
    return pack * step + static_cast<int>(threadIdx.x) * tile.pack_size;
  }
  // Only a thread's last packs can lie beyond the slice, because slices differ by 8 packs.
  __device__ __forceinline__ static bool in_slice(int pack, Slice cols) {
    return tile.exact || pack < num_packs - 1 - packs_at_once || col(pack) < cols.size();
  }
  // How many columns of a slice `lanes` neighbouring threads have, of which `first` is the first.
  __device__ __forceinline__ static int num_cols_of(Slice cols, int first, int lanes) {
    const int width = lanes * tile.pack_size, rest = cols.size() % step - first * tile.pack_size;
    return cols.size() / step * width + max(0, min(rest, width));
  }
};
