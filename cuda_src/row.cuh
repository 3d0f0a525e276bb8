// row.cuh -- where a row waits between its first and its last use
//
// RegisterRow   packs_per_thread packs in each thread
// SmemRow       a slice of the row in this block's shared memory
// GlobalRow     nowhere: each pass reads it again
// The first two keep the type that holds the row exactly, and unpack it in each pass.
// The three have pack_size, has_exact_sums, whether sums of values of one size are exact, num_packs of PackSums in
// statistics.cuh, most_made, packs of results that may wait in a thread as well, or 0, and for_each_pack(f): f(col, values) for
// each pack that this thread owns, always in the same order, and for_each_pack_or_none(f): f(col, values, in_row), also for
// packs beyond the row, whose values are any. f selects where a branch would keep the compiler from mixing the packs.
// for_each_pack_with(make, f) is the same, f(col, values, in_row, make(col)), where make loads: it is called a pack ahead where
// registers allow, as no load may pass what f stores. NextRow, StagedRow: how the row after comes to a RegisterRow, by its
// threads' loads or by the copy engine. Turns: whose row it is.
#pragma once
#include "bulk.cuh"
#include "pack.cuh"
#include "tile.cuh"

// Columns [first_col, last_col) of a row.
struct Slice {
  int first_col;
  int last_col;

  __device__ __forceinline__ int size() const { return last_col - first_col; }
};
// Share `rank` of `shares` of some columns, in steps of `step`, as even as they come; the last shares are the larger ones.
template <int shares, int step>
__device__ __forceinline__ Slice share_of(Slice whole, int rank) {
  const int num_steps = (whole.size() + step - 1) / step;
  const int fewest = num_steps / shares, num_small = shares - num_steps % shares;
  const int first = rank * fewest + max(rank - num_small, 0);
  const int last = first + fewest + (rank >= num_small);
  return {min(whole.first_col + first * step, whole.last_col), min(whole.first_col + last * step, whole.last_col)};
}
// The most columns of a share.
template <int shares, int step>
__device__ __forceinline__ int largest_share(int size) {
  return (size + shares * step - 1) / (shares * step) * step;
}
// The columns that block `rank` of its cluster owns, in steps of 8 packs. Slices that begin within the 128 bytes of a cache
// line made the copy engine read lines twice (H200, bf16, forward, 200,000 columns: 0.59 of a copy, then 0.73).
template <Tile tile>
__device__ __forceinline__ Slice slice(int num_cols, int rank) {
  return share_of<tile.cluster_size, 8 * tile.pack_size>({0, num_cols}, rank);
}

// Which rows a block or cluster takes, one after the other: neighbours take neighbouring rows. The num_first that the hardware
// starts first take rows_of_first each, the others share what is left: they start wherever one has ended, so that what gets
// less of the memory than its neighbours is given fewer rows.
template <Tile tile>
struct Turns {
  long long first_row, step;
  unsigned count;

  __device__ __forceinline__ explicit Turns(long long num_rows, long long num_first = 0, long long rows_of_first = 0) {
    const long long block = blockIdx.x / tile.cluster_size, num_blocks = gridDim.x / tile.cluster_size;
    const bool is_first = block < num_first;
    const long long shared_out = num_first * rows_of_first;
    const int group = tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) / tile.threads_per_row : 0;
    first_row = (is_first ? block : block - num_first) * tile.rows_per_block + group + (is_first ? 0 : shared_out);
    step = (is_first ? num_first : num_blocks - num_first) * tile.rows_per_block;
    const long long end = is_first ? min(shared_out, num_rows) : num_rows;
    count = first_row < end ? static_cast<unsigned>((end - first_row + step - 1) / step) : 0;
  }
};

// Where pack `pack` of this thread begins in its block's columns: neighbouring threads take neighbouring packs.
template <Tile tile>
__device__ __forceinline__ int register_col(int pack) {
  // A remainder that is not signed, from which one address serves all packs. Lone elements are faster with an address each
  // (H200, float32, forward, 1023 columns: 0.96, otherwise 0.89), and lanes that a row does not fill have registers for no
  // more. Where a row has the whole block, none that divides.
  constexpr bool is_signed = tile.pack_size == 1 || (tile.rows_per_block > 1 && !tile.exact);
  constexpr int divisor = tile.rows_per_block > 1 ? tile.threads_per_row : power_of_two_from(tile.threads_per_row);
  const int thread = is_signed ? static_cast<int>(threadIdx.x) % tile.threads_per_row : static_cast<int>(threadIdx.x % divisor);
  return (pack * tile.threads_per_row + thread) * tile.pack_size;
}

// Only a thread's last pack can lie beyond the block's columns, and none can if they fill the tile.
template <Tile tile>
__device__ __forceinline__ bool register_pack_in_row(int pack, int num_cols) {
  if constexpr (tile.exact) return true;
  return pack < tile.packs_per_thread - 1 || register_col<tile>(pack) < num_cols;
}

// Multiples of one number that are below 2^24 times it are floats: the sums of so many values of one size.
template <class Held>
constexpr int most_exact_cols = is_same<Held, __nv_bfloat16> ? 1 << 16
                                : is_same<Held, __half>      ? 1 << 13
                                                             : 0;

template <class Load, Tile tile>
struct RegisterRow {
  using Compute = typename Load::Compute;
  static constexpr int pack_size = tile.pack_size;
  static constexpr int threads_per_row = tile.threads_per_row;
  static constexpr bool has_exact_sums = tile.cols() * tile.cluster_size <= most_exact_cols<typename Load::Held>;
  static constexpr int num_packs = tile.threads_per_row <= 32 && tile.pack_size > 1 && !tile.bundle ? tile.packs_per_thread : 0;
  // Beyond 32 elements a thread, or 64 where it may have 128 registers, the unpacked values of 16-bit types would not fit.
  static constexpr int most_unpacked = tile.blocks_per_sm * tile.block_size() <= 512 ? 64 : 32;
  static constexpr int elements = tile.pack_size * tile.packs_per_thread;
  static constexpr bool unpack_each_pass = elements > most_unpacked;
  static constexpr int most_made = tile.cols() / tile.threads_per_row * sizeof(Compute) > 320 ? 0 : tile.packs_per_thread;

  // A quarter of a multiprocessor has 512 registers for each lane of all its warps.
  static constexpr int registers_of_thread = 512 / ((tile.blocks_per_sm * tile.block_size() + 127) / 128) / 8 * 8;
  // Beside y that waits: for one more, for what finds a maximum at once, and for the next row.
  static constexpr bool has_spare_registers = registers_of_thread >= elements + elements / 2 + 8;
  static constexpr bool is_tight = registers_of_thread < 96 && !has_spare_registers;
  static constexpr bool has_room_for_next = registers_of_thread >= elements + elements / 2 + 32 + 8 * !tile.exact;

  Pack<typename Load::Held, tile.pack_size> packs[tile.packs_per_thread];
  Slice cols;

  // All loads before the first use, so that they are in flight together. Beyond the row the first pack is loaded once more.
  __device__ __forceinline__ void fetch(const Load& load, long long row, Slice columns) {
    cols = columns;
    if constexpr (Load::has_effect) {
      typename Load::template Begun<tile.pack_size> begun[tile.packs_per_thread];
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack)
        begun[pack] = load.template begin<tile.pack_size>(row, col(pack));
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        packs[pack] = load.finish(row, col(pack), begun[pack], register_pack_in_row<tile>(pack, cols.size()));
      }
    } else {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
        packs[pack] = load.template load<tile.pack_size>(row, col(pack));
      }
    }
  }

  // From `own`, where this thread's first pack would lie in each of the load's streams: the others are constants away.
  template <int num_streams>
  __device__ __forceinline__ void fetch_own(const typename Load::Held* const (&own)[num_streams], Slice columns) {
    cols = columns;
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const bool in_row = register_pack_in_row<tile>(pack, cols.size());
      const int otherwise = tile.packs_per_thread > 1 ? 0 : -register_col<tile>(0);
      const int from = in_row ? pack * tile.threads_per_row * tile.pack_size : otherwise;
      Pack<typename Load::Held, tile.pack_size> loaded[num_streams];
#pragma unroll
      for (int stream = 0; stream < num_streams; ++stream) loaded[stream] = load_pack<tile.pack_size>(own[stream] + from);
      packs[pack] = Load::combine(loaded);
    }
  }

  // The row as it is, at the same places from `own`.
  __device__ __forceinline__ void leave_own(typename Load::Held* own, bool present) const {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (present && register_pack_in_row<tile>(pack, cols.size())) {
        store_pack<tile.pack_size>(own + pack * tile.threads_per_row * tile.pack_size, packs[pack]);
      }
    }
  }

  // Where a pack of this thread begins: a constant away from where its first does, so that one address serves all.
  __device__ __forceinline__ long long col_of(int pack) const {
    return cols.first_col + register_col<tile>(0) + static_cast<long long>(pack * (tile.cols() / tile.packs_per_thread));
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
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) f(col_of(pack), register_pack_in_row<tile>(pack, cols.size()));
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_or_none(F f) {
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      const bool in_row = register_pack_in_row<tile>(pack, cols.size());
      Compute values[tile.pack_size];
      unpack(packs[pack], values);
      f(col_of(pack), values, in_row);
    }
    forget();
  }
  template <class Make, class F>
  __device__ __forceinline__ void for_each_pack_with(Make make, F f) {
    // Threads that keep much in few registers have none for what a second pack needs: found by compiling, and held by tests.
    constexpr int made_words = sizeof(make(0)) / 4;
    constexpr int registers = 65536 / (tile.blocks_per_sm * tile.block_size()) / 8 * 8;
    constexpr int needed = elements + made_words + (sizeof(typename Load::Held) > 2 ? 33 : 24) + 12 * !tile.exact;
    constexpr bool packed_tight = elements > 40 && registers < 128 && made_words <= tile.pack_size;
    constexpr bool tight = sizeof(Compute) > 4 || (unpack_each_pass ? packed_tight : registers < needed);
    // Narrow rows lack warps rather than loads (H200, bf16, 32 and 64 columns: 3% slower with a pack ahead).
    constexpr int ahead = tight || tile.cols() < 128 ? 0 : 1;
    decltype(make(0)) made[tile.packs_per_thread];
#pragma unroll
    for (int pack = 0; pack < ahead; ++pack) made[pack] = make(col(pack));
#pragma unroll
    for (int pack = 0; pack < tile.packs_per_thread; ++pack) {
      if (pack + ahead < tile.packs_per_thread) made[pack + ahead] = make(col(pack + ahead));
      Compute values[tile.pack_size];
      unpack(packs[pack], values);
      f(col_of(pack), values, register_pack_in_row<tile>(pack, cols.size()), made[pack]);
    }
    forget();
  }

 private:
  // Where a pack is loaded from.
  __device__ __forceinline__ long long col(int pack) const {
    return register_pack_in_row<tile>(pack, cols.size()) ? col_of(pack) : cols.first_col;
  }
  __device__ __forceinline__ void forget() {
    if constexpr (unpack_each_pass) {
#pragma unroll
      for (int pack = 0; pack < tile.packs_per_thread; ++pack) forget_unpacked(packs[pack]);
    }
  }
};

// The row that a thread works on after the one in its registers, which comes there while that one is written; after the last
// the last again, as a condition takes registers too.
template <class Load, Tile tile>
struct NextRow {
  const Load& load;
  RegisterRow<Load, tile>& values;
  long long row;

  __device__ __forceinline__ NextRow(const Load& load, RegisterRow<Load, tile>& values, long long row, long long num_rows)
      : load(load), values(values), row(min(row, num_rows - 1)) {}
  __device__ __forceinline__ void fetch() const { values.fetch(load, row, values.cols); }
};
struct NoNextRow {
  __device__ __forceinline__ void fetch() const {}
};

// The copy engine brings a row to shared memory while the threads of its block work on the one before: they wait for a load
// from there, not from memory, and keep no registers for it.
template <class Load, Tile tile>
struct StagedRow {
  using Held = typename Load::Held;
  static constexpr int slot_bytes = (tile.cols() * static_cast<int>(sizeof(Held)) + 15) / 16 * 16;

  Held* slot;
  unsigned long long* barrier;
  unsigned turn = 0;

  // smem: 16-byte aligned. The caller synchronises the block before the first row is taken.
  __device__ __forceinline__ explicit StagedRow(unsigned char* smem)
      : slot(reinterpret_cast<Held*>(smem)), barrier(reinterpret_cast<unsigned long long*>(smem + slot_bytes)) {
    if (threadIdx.x == 0) bulk_barrier_init(barrier);
  }
  // The thread that made the barrier, when all have taken the row before.
  __device__ __forceinline__ void fetch(const Load& load, long long row, int num_cols) const {
    const unsigned bytes = static_cast<unsigned>(num_cols) * static_cast<unsigned>(sizeof(Held));
    bulk_expect(barrier, bytes);
    bulk_copy(slot, load.row_start(row), bytes, barrier);
  }
  __device__ __forceinline__ void take(RegisterRow<Load, tile>& values, Slice cols) {
    bulk_wait(barrier, turn++);
    values.fetch_own({slot + register_col<tile>(0)}, cols);
  }
};

// Columns [first_col, last_col) of a row. A thread owns the same packs in fetch and in for_each_pack: it waits for no other.
template <class Held, class Compute, Tile tile>
struct SmemRow {
  static constexpr int pack_size = tile.pack_size;
  static constexpr bool has_exact_sums = false;
  static constexpr int num_packs = 0;
  static constexpr int most_made = 0;

  Held* held;
  int first_col = 0;
  int last_col = 0;

  __device__ __forceinline__ explicit SmemRow(unsigned char* smem) : held(reinterpret_cast<Held*>(smem)) {}

  template <class Load>
  __device__ __forceinline__ void fetch(const Load& load, long long row, Slice cols) {
    first_col = cols.first_col;
    last_col = cols.last_col;
    for (int col = first_col + threadIdx.x * tile.pack_size; col < last_col; col += tile.threads_per_row * tile.pack_size) {
      store_pack<tile.pack_size>(held + (col - first_col), load.template load<tile.pack_size>(row, col));
    }
  }

  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) const {
    for (int col = first_col + threadIdx.x * tile.pack_size; col < last_col; col += tile.threads_per_row * tile.pack_size) {
      Compute values[tile.pack_size];
      unpack(load_pack<tile.pack_size>(held + (col - first_col)), values);
      f(col, values);
    }
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_or_none(F f) const {
    for_each_pack([&](int col, const auto& values) { f(col, values, true); });
  }
  template <class Make, class F>
  __device__ __forceinline__ void for_each_pack_with(Make make, F f) const {
    for_each_pack([&](int col, const auto& values) { f(col, values, true, make(col)); });
  }
};

// The row of a kernel that keeps it in registers or, if packs_per_thread is 0, in `smem`.
template <class Load, Tile tile>
__device__ __forceinline__ auto row_on_chip(unsigned char* smem) {
  if constexpr (tile.packs_per_thread > 0) {
    return RegisterRow<Load, tile>{};
  } else {
    return SmemRow<typename Load::Held, typename Load::Compute, tile>(smem);
  }
}

template <class Load, Tile tile>
struct GlobalRow {
  using Compute = typename Load::Compute;
  static constexpr int pack_size = tile.pack_size;
  static constexpr bool has_exact_sums = false;
  static constexpr int num_packs = 0;
  static constexpr int most_made = 0;

  const Load& load;
  long long row;
  long long num_cols;
  bool first_pass = true;

  template <class F>
  __device__ __forceinline__ void for_each_pack(F f) {
    const long long step = static_cast<long long>(tile.threads_per_row) * tile.pack_size;
    for (long long col = static_cast<long long>(threadIdx.x) * tile.pack_size; col < num_cols; col += step) {
      Compute values[tile.pack_size];
      if (first_pass) {
        unpack(load.template load<tile.pack_size>(row, col), values);
      } else {
        unpack(load.template reload<tile.pack_size>(row, col), values);
      }
      f(col, values);
    }
    first_pass = false;
  }
  template <class F>
  __device__ __forceinline__ void for_each_pack_or_none(F f) {
    for_each_pack([&](long long col, const auto& values) { f(col, values, true); });
  }
  template <class Make, class F>
  __device__ __forceinline__ void for_each_pack_with(Make make, F f) {
    for_each_pack([&](long long col, const auto& values) { f(col, values, true, make(col)); });
  }
};
