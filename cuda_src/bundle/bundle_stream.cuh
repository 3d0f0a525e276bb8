// bundle_stream.cuh -- bundles of one tensor, and their images in shared memory
//
// BundleParts     how the lanes of a warp share a bundle
// BundleStream    a tensor [num_rows, num_cols] without gaps, and its images in a slot
#pragma once
#include "ring_shape.cuh"

// A group of lanes shares a row. Groups of 8 lanes or more have a part of the bundle each. The
// image of a part has banks of its own in shared memory: rows that begin anywhere would cause bank
// conflicts. Smaller groups share one part: their rows, of odd widths, fall on different banks.
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
