// grid_shape.cuh -- which rows, columns, registers and shared memory a block of path `grid` has
//
// A group of cluster_size blocks shares a row, and each group takes every num_groups-th row. All
// blocks of the launch are resident at once. A block has a slice of each row. The threads of its
// first warps are workers: worker t has packs t, t + num_workers, ... of the slice. They travel
// through `stages` slots of shared memory (grid_turns.cuh). The other warps exchange sums
// (grid_exchange.cuh).
#pragma once
#include "memory.cuh"
#include "slice.cuh"

template <Tile tile>
struct GridShape {
  static constexpr int num_blocks = tile.cluster_size;
  static constexpr int num_exchangers = 4;
  static constexpr int num_warps = tile.threads_per_row / 32 - num_exchangers;  // that work
  static constexpr int num_workers = 32 * num_warps;
  static constexpr int step = num_workers * tile.pack_size;
  static constexpr int num_packs = tile.packs_per_thread;  // of a row that a worker has

  // Packs that a worker takes in one step; a slot has those of one step. Few warps need more.
  static constexpr int packs_at_once = num_warps <= 8 ? 2 : 1;
  static constexpr int num_steps = num_packs / packs_at_once;  // of a row

  // A worker writes packs `lag` steps after it has summed them: the sums of their row must travel
  // between the blocks first. The packs of the next in_flight steps are on their way to shared
  // memory. So packs that stay until they are written take lag + 1 + in_flight slots. If there are
  // fewer, the packs are dropped once they are summed, and copied a second time from the L2 cache.
  static constexpr bool copies_twice = tile.stages < num_steps + 2;
  static constexpr int most_lag = 6 * num_steps;  // six turns
  static constexpr int clamp(int value, int least, int most) {
    return value < least ? least : value > most ? most : value;
  }
  // The lag if a quarter of the slots is in flight, and if an eighth is. Between these two it is
  // three turns.
  static constexpr int lag_of_quarter = tile.stages - 1 - clamp(tile.stages / 4, 1, 64);
  static constexpr int lag_of_eighth = tile.stages - 1 - clamp(tile.stages / 8, 1, 64);
  static constexpr int wanted_lag = clamp(3 * num_steps, lag_of_quarter, lag_of_eighth);
  static constexpr int lag =
      copies_twice ? num_steps + (num_steps + 3) / 4 : clamp(wanted_lag, num_steps, most_lag);
  static constexpr int in_flight = copies_twice ? tile.stages / 2 - 1 : tile.stages - 1 - lag;
  static constexpr int turns_behind = (lag + num_steps - 1) / num_steps;
  static constexpr int turns_ahead = (in_flight + num_steps - 1) / num_steps;
  static_assert(in_flight > 0 && num_packs % packs_at_once == 0);

  // Registers of a thread for what it keeps from row to row: all but those for one step.
  static constexpr int spare_registers =
      512 / ((tile.block_size() + 127) / 128) / 8 * 8 - (packs_at_once == 2 ? 96 : 80);
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

// A tensor whose packs travel through shared memory. A place has one pack of each worker. The first
// place begins at first_byte; `place` is another one's distance from it in bytes.
template <class X, Tile tile, int first_byte>
struct GridStream {
  using Shape = GridShape<tile>;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int place_bytes = Shape::step * static_cast<int>(sizeof(X));
  static constexpr int last_byte = first_byte + place_bytes;

  const X* copied[2];  // this thread's first pack of the row that is copied; of that copied again

  template <bool again, class Load>
  __device__ __forceinline__ void begin_copies(const Load& load, long long turn, Slice cols) {
    copied[again] = load.row_start(Shape::row(turn)) + cols.first_col + Shape::col(0);
  }
  template <bool again>
  __device__ __forceinline__ void copy(int pack, int place) const {
    async_copy<pack_size>(at(place), copied[again] + pack * Shape::step);
  }
  __device__ __forceinline__ Pack<X, pack_size> load(int place) const {
    return load_pack<pack_size>(at(place));
  }

 private:
  __device__ __forceinline__ static X* at(int place) {
    return reinterpret_cast<X*>(dynamic_smem() + first_byte + place) + threadIdx.x * pack_size;
  }
};
