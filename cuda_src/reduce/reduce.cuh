// reduce.cuh -- all-reduce over the threads that share a row: part of a warp, or a block
//
// A value to reduce is a struct with `Compute part[size]`, merge(other), `ordered` and
// `is_maximum`: Sum below, Moments (sums.cuh), Largest (amax.cuh). Every thread gets the same bits:
// partners merge the same two operands, in the same order where the order matters. The order
// depends on the tile alone, never on the number of rows. Clusters: cluster_reduce.cuh.
#pragma once
#include "memory.cuh"
#include "tile.cuh"
#include "warp_max.cuh"

template <class Compute, int num_parts>
struct Sum {
  static constexpr int size = num_parts;
  static constexpr bool ordered = false, is_maximum = false;  // a + b has the bits of b + a
  Compute part[num_parts];

  __device__ __forceinline__ void merge(const Sum& other) {
#pragma unroll
    for (int at = 0; at < size; ++at) part[at] += other.part[at];
  }
};

// Butterfly over groups of `threads` neighbouring lanes; all 32 lanes of the warp must call it. The
// most distant lanes come first, which continues the order of PackSums (sums.cuh).
template <int threads, class Value>
__device__ __forceinline__ Value warp_reduce(Value value) {
  if constexpr (Value::is_maximum && threads == 32) {
    value.part[0] = __uint_as_float(warp_max(__float_as_uint(value.part[0])));
  } else {
#pragma unroll
    for (int distance = threads / 2; distance > 0; distance /= 2) {
      Value other;
#pragma unroll
      for (int at = 0; at < Value::size; ++at)
        other.part[at] = __shfl_xor_sync(0xffffffffu, value.part[at], distance);
      if constexpr (Value::ordered) {
        // The lower lane's value comes first in both lanes.
        if (threadIdx.x & distance) {
          other.merge(value);
          value = other;
        } else {
          value.merge(other);
        }
      } else {
        value.merge(other);
      }
    }
  }
  return value;
}
// The same for a sum of one number.
template <int threads, class Compute>
__device__ __forceinline__ Compute warp_sum(Compute value) {
  return warp_reduce<threads>(Sum<Compute, 1>{{value}}).part[0];
}
// The same as warp_reduce if all groups of `threads` lanes hold the same values: then a maximum is
// that of the warp.
template <int threads, class Value>
__device__ __forceinline__ Value repeated_reduce(Value value) {
  return warp_reduce<Value::is_maximum ? 32 : threads>(value);
}

template <int threads>
struct WarpReduce {
  static_assert(threads <= 32 && (threads & (threads - 1)) == 0,
                "lanes that share a row: a power of two up to 32");
  template <class Value>
  __device__ __forceinline__ Value all(Value value) const {
    return warp_reduce<threads>(value);
  }
};

// One barrier a reduction. Two buffers alternate, so that the next value of a fast warp cannot
// overwrite what a slow warp reads.
template <int threads, class Compute>
struct BlockReduce {
  static_assert(threads % 32 == 0 && threads <= 1024, "a block of whole warps");
  static constexpr int num_warps = threads / 32;
  static constexpr int max_parts = 3;
  static constexpr int smem_bytes = (2 * max_parts * num_warps * sizeof(Compute) + 15) / 16 * 16;

  Compute* buffers;
  int turn = 0;

  __device__ __forceinline__ explicit BlockReduce(unsigned char* smem)
      : buffers(reinterpret_cast<Compute*>(smem)) {}

  template <class Value>
  __device__ __forceinline__ Value all(Value value) {
    static_assert(Value::size <= max_parts, "the buffers hold max_parts values a warp");
    value = warp_reduce<32>(value);
    if constexpr (num_warps > 1) {
      const int lane = threadIdx.x % 32;
      const int warp = threadIdx.x / 32;
      Compute* buffer = buffers + turn * max_parts * num_warps;
      turn ^= 1;
      if (lane == 0) {
#pragma unroll
        for (int at = 0; at < Value::size; ++at) buffer[at * num_warps + warp] = value.part[at];
      }
      __syncthreads();
      constexpr int width = power_of_two_from(num_warps);
      const int source = lane % width;
#pragma unroll
      for (int at = 0; at < Value::size; ++at) {
        value.part[at] = source < num_warps ? buffer[at * num_warps + source] : Compute(0);
      }
      value = repeated_reduce<width>(value);
    }
    return value;
  }
};

// A group of threads covers `width` columns; each thread has `sums` of pack_size columns from
// own_col on. Writes to total the sum over all groups, for the first num_cols columns. of_groups:
// shared memory for num_groups * width sums.
template <int width, int num_groups, int pack_size, class Compute>
__device__ __forceinline__ void add_groups(Compute* of_groups, const Compute (&sums)[pack_size],
                                           int group, int own_col, Compute* total,
                                           long long num_cols) {
#pragma unroll
  for (int at = 0; at < pack_size; ++at) of_groups[group * width + own_col + at] = sums[at];
  __syncthreads();
  for (int col = threadIdx.x; col < width && col < num_cols; col += blockDim.x) {
    Compute sum = of_groups[col];
#pragma unroll
    for (int from = 1; from < num_groups; ++from) sum += of_groups[from * width + col];
    total[col] = sum;
  }
}
