// bundle.cuh -- rows that begin anywhere, several at a time, through the shared memory of a warp (forward_warp, backward_warp)
//
// Copy engine and wide stores want 16 bytes that begin on 16; rows of odd widths do not. But rows that follow one another are
// one piece of memory, of which only the ends share 16 bytes with others: a bundle. Its image in shared memory begins as far
// into 16 bytes as it does itself. Rows are read in the image, their results take their places (of a residual: their sums), and
// whole units leave.
// Rows of 16-bit elements that begin there gain as well, where no tile of registers fits their width: whole lines move.
//
// BundleParts    which lanes of a warp share an image: the 8 to 32 of a row, or all of them
// BundleStream   a tensor [num_rows, num_cols] without gaps, and its images in a slot
// Bundles        a warp's ring of `stages` slots, filled by the copy engine
// result_image, write_image   where the results of a part wait in its image, and to where they belong
#pragma once
#include "ring.cuh"

template <Tile tile>
struct BundleParts {
  static constexpr int groups = 32 / tile.threads_per_row;  // of lanes that share a row
  // Rows that neighbours read at once begin anywhere among the banks of shared memory, and would meet there: each group has an
  // image of its own, at its own banks. Lanes that have a row each, of an odd width, do not meet.
  static constexpr int count = tile.threads_per_row >= 8 ? groups : 1;
  static constexpr int lanes = 32 / count, most_rows = tile.bundle / count, rows_at_once = groups / count;

  __device__ __forceinline__ static int own() { return static_cast<int>(threadIdx.x) % 32 / lanes; }
  // Of the first row that this lane's group takes in a part.
  __device__ __forceinline__ static int first_row() {
    return count > 1 ? 0 : static_cast<int>(threadIdx.x) % 32 / tile.threads_per_row;
  }
};

template <Tile tile, class T>
struct BundleStream {
  using Parts = BundleParts<tile>;
  using Offset = RingOffset<Tile{.pack_size = 1, .threads_per_row = 32}, T>;

  const T* start;  // null: absent
  int num_cols;

  // 16 bytes before the first unit, for results that begin earlier in it.
  __device__ __forceinline__ int image_bytes() const {
    const int bytes = (Parts::most_rows * num_cols * static_cast<int>(sizeof(T)) + 15) / 16 * 16 + 32;
    return Parts::count > 1 ? bytes + ((128 / Parts::count - bytes) & 127) : bytes;
  }
  __device__ __forceinline__ int slot_bytes() const { return Parts::count * image_bytes(); }
  // Where rows from first_row on are, in the image of a part of the slot whose images of this stream begin at `images`.
  __device__ __forceinline__ const T* in(const unsigned char* images, int part, long long first_row) const {
    return reinterpret_cast<const T*>(images + part * image_bytes() + 16 +
                                      reinterpret_cast<unsigned long long>(start + first_row * num_cols) % 16);
  }
  __device__ __forceinline__ unsigned fetched_bytes(long long first_row, int num_rows) const {
    return start == nullptr ? 0 : Offset::fetched_bytes(start + first_row * num_cols, num_rows * num_cols);
  }
  __device__ __forceinline__ void fetch(unsigned char* images, int part, long long first_row, int num_rows,
                                        unsigned long long* barrier) const {
    if (start == nullptr) return;
    bulk_copy(images + part * image_bytes() + 16, Offset::fetched_from(start + first_row * num_cols),
              fetched_bytes(first_row, num_rows), barrier);
  }
};

template <Tile tile, class... T>
struct Bundles {
  using Parts = BundleParts<tile>;
  static constexpr int num_warps = tile.block_size() / 32;

  unsigned char* slots;          // of this warp
  unsigned long long* barriers;  // one a slot
  int slot_bytes;
  int part_rows;                    // tile.bundle rows in all parts, but fewer where there are not enough for all warps
  long long num_rows, first, step;  // the first row of the warp's first bundle, and how many lie between its bundles

  __device__ __forceinline__ Bundles(unsigned char* smem, long long num_rows, const BundleStream<tile, T>&... streams)
      : slot_bytes((streams.slot_bytes() + ...)), num_rows(num_rows) {
    const int warp = threadIdx.x / 32;
    const long long all_warps = static_cast<long long>(gridDim.x) * num_warps;
    const long long needed = (num_rows + all_warps * Parts::groups - 1) / (all_warps * Parts::groups) * Parts::rows_at_once;
    part_rows = static_cast<int>(min(needed, static_cast<long long>(Parts::most_rows)));
    first = (static_cast<long long>(blockIdx.x) * num_warps + warp) * part_rows * Parts::count;
    step = all_warps * part_rows * Parts::count;
    slots = smem + warp * tile.stages * slot_bytes;
    barriers = reinterpret_cast<unsigned long long*>(smem + num_warps * tile.stages * slot_bytes) + warp * tile.stages;
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < tile.stages; ++slot) bulk_barrier_init(barriers + slot, Parts::count);
    }
    __syncwarp();
    for (int slot = 0; slot < tile.stages; ++slot) fetch(slot, first + slot * step, streams...);
  }

  // f(slot, part, first_row, rows, turns) for each bundle of this warp, when it has landed: `rows` rows are this lane's part of
  // it, which the warp takes in so many turns. A part without rows has those of the first to read.
  template <class F>
  __device__ __forceinline__ void for_each(F f, const BundleStream<tile, T>&... streams) const {
    int slot = 0;
    unsigned round = 0;
    for (long long bundle = first; bundle < num_rows; bundle += step) {
      bulk_wait(barriers + slot, round);
      const int rows = rows_of(bundle, Parts::own()), part = rows > 0 ? Parts::own() : 0;
      const int turns = (rows_of(bundle, 0) + Parts::rows_at_once - 1) / Parts::rows_at_once;
      f(slots + slot * slot_bytes, part, bundle + part * part_rows, rows, turns);
      // What was written came from all that was read: the slot is free.
      __syncwarp();
      fetch(slot, bundle + tile.stages * step, streams...);
      if (++slot == tile.stages) {
        slot = 0;
        ++round;
      }
    }
  }

 private:
  __device__ __forceinline__ int rows_of(long long bundle, int part) const {
    const long long left = num_rows - bundle - part * part_rows;
    return static_cast<int>(max(0LL, min(static_cast<long long>(part_rows), left)));
  }
  // By one lane a part.
  __device__ __forceinline__ void fetch(int slot, long long bundle, const BundleStream<tile, T>&... streams) const {
    const int part = threadIdx.x % 32;
    if (bundle >= num_rows || part >= Parts::count) return;
    const long long first_row = bundle + part * part_rows;
    const int rows = rows_of(bundle, part);
    if (rows == 0) {
      bulk_arrive(barriers + slot);
      return;
    }
    bulk_expect(barriers + slot, (streams.fetched_bytes(first_row, rows) + ...));
    unsigned char* images = slots + slot * slot_bytes;
    ((streams.fetch(images, part, first_row, rows, barriers + slot), images += streams.slot_bytes()), ...);
  }
};

// As far into 16 bytes as `to`, and not after `from`, in whose image it is: a result never takes the place of what a later row
// still is to read.
template <class T>
__device__ __forceinline__ T* result_image(const T* from, const T* to) {
  const unsigned long long from_offset = reinterpret_cast<unsigned long long>(from) % 16;
  const unsigned long long to_offset = reinterpret_cast<unsigned long long>(to) % 16;
  return const_cast<T*>(from) - (from_offset + 16 - to_offset) % 16 / sizeof(T);
}

// By the lanes of the part.
template <int lanes, class T>
__device__ __forceinline__ void write_image(T* to, const T* image, int size) {
  constexpr int unit = 16 / sizeof(T);
  static_assert(lanes >= unit - 1, "what shares its unit with others takes one turn");
  const int lane = threadIdx.x % lanes;
  const int before = static_cast<int>(reinterpret_cast<unsigned long long>(to) % 16 / sizeof(T));
  const int head = min(size, (unit - before) % unit);
  const int num_units = (size - head) / unit, tail = head + num_units * unit;
  // Lanes that write together write whole lines of 128 bytes.
  const int in_line = static_cast<int>(reinterpret_cast<unsigned long long>(to + head) / 16 % 8);
  for (int at = lane - in_line; at < num_units; at += lanes) {
    if (at >= 0) store_pack<unit>(to + head + at * unit, load_pack<unit>(image + head + at * unit));
  }
  if (lane < head) to[lane] = image[lane];
  if (lane < size - tail) to[tail + lane] = image[tail + lane];
}
