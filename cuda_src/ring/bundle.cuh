// bundle.cuh -- several rows at a time through the shared memory of a warp, wherever the rows begin
//
// The copy engine and wide stores need addresses that are multiples of 16 bytes; rows of odd widths
// have others. But consecutive rows without gaps are one piece of memory, a bundle: only its ends
// share 16 bytes with other rows. A warp copies a bundle to shared memory. This image begins at the
// same offset within 16 bytes as the bundle. The warp reads rows from the image, writes its results
// over them, and whole units of 16 bytes go back to memory. Rows of 16-bit elements that fill no
// tile of registers well gain too, because whole lines move.
#pragma once
#include "ring.cuh"

// How the lanes of a warp share a bundle. A group of lanes shares a row. Groups of 8 lanes or more
// have a part of the bundle each. The image of a part has banks of its own in shared memory: rows
// that begin anywhere would cause bank conflicts. Smaller groups share one part: their rows, of odd
// widths, fall on different banks.
template <Tile tile>
struct BundleParts {
  static constexpr int groups = 32 / tile.threads_per_row;
  static constexpr int count = tile.threads_per_row >= 8 ? groups : 1;
  static constexpr int lanes = 32 / count;               // of a part
  static constexpr int most_rows = tile.bundle / count;  // of a part
  static constexpr int rows_at_once = groups / count;    // of a part: a row for each of its groups

  // The part of this lane.
  __device__ __forceinline__ static int own() { return static_cast<int>(threadIdx.x) % 32 / lanes; }
  // The first of the rows of a part that this lane's group works on.
  __device__ __forceinline__ static int first_row() {
    return count > 1 ? 0 : static_cast<int>(threadIdx.x) % 32 / tile.threads_per_row;
  }
};

// A tensor [num_rows, num_cols] without gaps, and its images in a slot.
template <Tile tile, class T>
struct BundleStream {
  using Parts = BundleParts<tile>;
  using Part = RingPart<Tile{.pack_size = 1, .threads_per_row = 32}, T>;  // of single elements

  const T* start;  // null: absent
  int num_cols;

  // Has 16 bytes more at the start, for results whose offset is smaller than that of the rows.
  __device__ __forceinline__ int image_bytes() const {
    const int bytes =
        (Parts::most_rows * num_cols * static_cast<int>(sizeof(T)) + 15) / 16 * 16 + 32;
    return Parts::count > 1 ? bytes + ((128 / Parts::count - bytes) & 127) : bytes;
  }
  __device__ __forceinline__ int slot_bytes() const { return Parts::count * image_bytes(); }
  // Where the rows from first_row on are in the image of a part. images: those of this stream in a
  // slot.
  __device__ __forceinline__ const T* in(const unsigned char* images, int part,
                                         long long first_row) const {
    return reinterpret_cast<const T*>(
        images + part * image_bytes() + 16 +
        reinterpret_cast<unsigned long long>(start + first_row * num_cols) % 16);
  }
  __device__ __forceinline__ unsigned fetched_bytes(long long first_row, int num_rows) const {
    if (start == nullptr) return 0;
    return Part::fetched_bytes(start + first_row * num_cols, num_rows * num_cols);
  }
  __device__ __forceinline__ void fetch(unsigned char* images, int part, long long first_row,
                                        int num_rows, unsigned long long* barrier) const {
    if (start == nullptr) return;
    bulk_copy(images + part * image_bytes() + 16, Part::fetched_from(start + first_row * num_cols),
              fetched_bytes(first_row, num_rows), barrier);
  }
};

// Where results for `to` go in the image of `from`: at the same offset within 16 bytes as `to`, and
// not behind `from`. So a result never overwrites a row that is still to be read.
template <class T>
__device__ __forceinline__ T* result_image(const T* from, const T* to) {
  const unsigned long long from_offset = reinterpret_cast<unsigned long long>(from) % 16;
  const unsigned long long to_offset = reinterpret_cast<unsigned long long>(to) % 16;
  return const_cast<T*>(from) - (from_offset + 16 - to_offset) % 16 / sizeof(T);
}

// Called by the lanes of a part: writes `size` elements of an image to global memory.
template <int lanes, class T>
__device__ __forceinline__ void write_image(T* to, const T* image, int size) {
  constexpr int unit = 16 / sizeof(T);
  static_assert(lanes >= unit - 1, "the elements of an incomplete unit take one turn");
  const int lane = threadIdx.x % lanes;
  const int before = static_cast<int>(reinterpret_cast<unsigned long long>(to) % 16 / sizeof(T));
  const int head = min(size, (unit - before) % unit);
  const int num_units = (size - head) / unit, tail = head + num_units * unit;
  // Lanes that write at the same time write whole lines of 128 bytes.
  const int in_line = static_cast<int>(reinterpret_cast<unsigned long long>(to + head) / 16 % 8);
  for (int at = lane - in_line; at < num_units; at += lanes) {
    if (at >= 0) store_pack<unit>(to + head + at * unit, load_pack<unit>(image + head + at * unit));
  }
  if (lane < head) to[lane] = image[lane];
  if (lane < size - tail) to[tail + lane] = image[tail + lane];
}

// A warp's ring of `stages` slots, filled by the copy engine.
template <Tile tile, class... T>
struct Bundles {
  using Parts = BundleParts<tile>;
  static constexpr int num_warps = tile.block_size() / 32;

  unsigned char* slots;          // of this warp
  unsigned long long* barriers;  // one a slot
  int slot_bytes;
  int part_rows;  // rows of a part: most_rows, or fewer if there are not enough for all warps
  long long num_rows;
  long long first;  // the first row of this warp's first bundle
  long long step;   // rows from one bundle of this warp to the next

  __device__ __forceinline__ Bundles(unsigned char* smem, long long num_rows,
                                     const BundleStream<tile, T>&... streams)
      : slot_bytes((streams.slot_bytes() + ...)), num_rows(num_rows) {
    const int warp = threadIdx.x / 32;
    const long long all_warps = static_cast<long long>(gridDim.x) * num_warps;
    const long long needed = (num_rows + all_warps * Parts::groups - 1) /
                             (all_warps * Parts::groups) * Parts::rows_at_once;
    part_rows = static_cast<int>(min(needed, static_cast<long long>(Parts::most_rows)));
    first = (static_cast<long long>(blockIdx.x) * num_warps + warp) * part_rows * Parts::count;
    step = all_warps * part_rows * Parts::count;
    slots = smem + warp * tile.stages * slot_bytes;
    barriers = reinterpret_cast<unsigned long long*>(smem + num_warps * tile.stages * slot_bytes) +
               warp * tile.stages;
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < tile.stages; ++slot)
        bulk_barrier_init(barriers + slot, Parts::count);
    }
    __syncwarp();
    for (int slot = 0; slot < tile.stages; ++slot) fetch(slot, first + slot * step, streams...);
  }

  // f(slot, part, first_row, num_rows, num_turns) for each bundle of this warp, once it has
  // arrived. This lane's part has num_rows rows from first_row on, and the warp works on its rows
  // in num_turns turns. The lanes of a part without rows read those of the first part.
  template <class F>
  __device__ __forceinline__ void for_each(F f, const BundleStream<tile, T>&... streams) const {
    int slot = 0;
    unsigned round = 0;
    for (long long bundle = first; bundle < num_rows; bundle += step) {  // its first row
      bulk_wait(barriers + slot, round);
      const int rows = rows_of(bundle, Parts::own()), part = rows > 0 ? Parts::own() : 0;
      const int turns = (rows_of(bundle, 0) + Parts::rows_at_once - 1) / Parts::rows_at_once;
      f(slots + slot * slot_bytes, part, bundle + part * part_rows, rows, turns);
      // All lanes have written, so all have read: the slot is free.
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
  // Called by all lanes: one lane fetches each part.
  __device__ __forceinline__ void fetch(int slot, long long bundle,
                                        const BundleStream<tile, T>&... streams) const {
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
    ((streams.fetch(images, part, first_row, rows, barriers + slot),
      images += streams.slot_bytes()),
     ...);
  }
};
