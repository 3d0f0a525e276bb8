// bundle.cuh -- several rows at a time through the shared memory of a warp, wherever the rows begin
//
// The copy engine and wide stores need addresses that are multiples of 16 bytes; rows of odd widths
// have others. But consecutive rows without gaps are one piece of memory, a bundle: only its ends
// share 16 bytes with other rows. A warp copies a bundle to shared memory. This image begins at the
// same offset within 16 bytes as the bundle. The warp reads rows from the image, writes its results
// over them, and whole units of 16 bytes go back to memory (result_image.cuh). Rows of 16-bit
// elements that fill no tile of registers well gain too, because whole lines move.
#pragma once
#include "bundle_stream.cuh"

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
