// tile.cuh -- Tile, the compile-time integers of a kernel; which rows and columns a thread has
//
// A Tile is a template argument with designated initialisers, so a kernel's name explains itself:
//   forward_warp<..., Tile{.pack_size = 8, .threads_per_row = 32, .packs_per_thread = 4}>
#pragma once
#include "pack.cuh"

constexpr int power_of_two_from(int count) {
  int power = 1;
  while (power < count) power *= 2;
  return power;
}

// How a row travels between its uses.
enum class Path {
  registers,  // threads load it and keep it in registers
  smem,       // threads load it and keep it in shared memory
  ring,       // the copy engine brings rows to a ring in shared memory (ring.cuh)
  bundle,     // the copy engine brings several rows as one piece to shared memory (bundle.cuh)
  uncached,   // threads load it again for each use
};

struct Tile {
  int pack_size;             // elements moved by one memory instruction
  int threads_per_row;       // threads of one block that share a row
  int packs_per_thread = 0;  // packs of a row that one thread keeps in registers
  int rows_per_block = 1;    // rows that one block works on at a time
  int cluster_size = 1;      // blocks that share a row
  int blocks_per_sm = 1;  // blocks that must fit on a multiprocessor: bounds a thread's registers
  int exact = 0;          // 1: the row fills the registers, no pack lies beyond it
  int stages = 0;         // rows or bundles that the copy engine fetches
  int bundle = 0;         // consecutive rows that make up one stage of a warp
  int early = 0;          // 1: weight and bias load with the row, before its statistics (forward)
  Path path = Path::registers;

  constexpr int block_size() const { return threads_per_row * rows_per_block; }
  // Columns that fit the registers of the threads of a block that share a row.
  constexpr int cols() const { return pack_size * threads_per_row * packs_per_thread; }
};

// How mean and variance are formed. Both subtract before they square.
enum class Statistics { two_pass, welford };

// Which gradients a backward kernel is asked for.
struct Gradients {
  bool dx;
  bool dweight;
  bool dbias;
};

// Neighbouring blocks take neighbouring rows. The first num_first blocks, which the hardware starts
// first, take rows_of_first rows each. The other blocks start whenever one has finished and share
// the remaining rows. So a multiprocessor that gets less memory bandwidth works on fewer rows.
template <Tile tile>
struct Turns {
  long long first_row, step;
  unsigned count;

  __device__ __forceinline__ explicit Turns(long long num_rows, long long num_first = 0,
                                            long long rows_of_first = 0) {
    const long long block = blockIdx.x / tile.cluster_size;
    const long long num_blocks = gridDim.x / tile.cluster_size;
    const bool is_first = block < num_first;
    const long long shared_out = num_first * rows_of_first;
    const int group =
        tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) / tile.threads_per_row : 0;
    first_row = (is_first ? block : block - num_first) * tile.rows_per_block + group +
                (is_first ? 0 : shared_out);
    step = (is_first ? num_first : num_blocks - num_first) * tile.rows_per_block;
    const long long end = is_first ? min(shared_out, num_rows) : num_rows;
    count = first_row < end ? static_cast<unsigned>((end - first_row + step - 1) / step) : 0;
  }
};

// Columns [first_col, last_col) of a row.
struct Slice {
  int first_col;
  int last_col;

  __device__ __forceinline__ int size() const { return last_col - first_col; }
};

// Divides columns into `shares` parts in steps of `step` and returns part `rank`. The sizes differ
// by at most one step; the last parts are the larger ones.
template <int shares, int step>
__device__ __forceinline__ Slice share_of(Slice whole, int rank) {
  const int num_steps = (whole.size() + step - 1) / step;
  const int fewest = num_steps / shares, num_small = shares - num_steps % shares;
  const int first = rank * fewest + max(rank - num_small, 0);
  const int last = first + fewest + (rank >= num_small);
  return {min(whole.first_col + first * step, whole.last_col),
          min(whole.first_col + last * step, whole.last_col)};
}

// The most columns that share_of gives to one part.
template <int shares, int step>
__device__ __forceinline__ int largest_share(int size) {
  return (size + shares * step - 1) / (shares * step) * step;
}

// The columns that block `rank` of its cluster owns. Steps of 8 packs keep the slices apart by
// whole cache lines: the copy engine reads a line twice if two slices share it.
template <Tile tile>
__device__ __forceinline__ Slice slice(int num_cols, int rank) {
  return share_of<tile.cluster_size, 8 * tile.pack_size>({0, num_cols}, rank);
}

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

// A float sum of so many values of about one magnitude is exact: it is less than 2^24 times their
// last bit. They may lie on both sides of a power of two, which costs one bit.
template <class Held>
constexpr int most_exact_cols = is_same<Held, __nv_bfloat16> ? 1 << 15
                                : is_same<Held, __half>      ? 1 << 12
                                                             : 0;
