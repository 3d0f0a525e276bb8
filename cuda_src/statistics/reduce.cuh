// reduce.cuh -- sums of a thread's packs, and all-reduce over the threads that share a row
//
// A value to reduce is a struct with `Compute part[size]`, merge(other), `ordered` and
// `is_maximum`: Sum, Moments, Largest (scales.cuh). The threads are part of a warp, or a block;
// clusters: cluster_reduce.cuh. Every thread gets the same bits: partners merge the same two
// operands, in the same order where the order matters. The order depends on the tile alone, never
// on the number of rows.
#pragma once
#include "memory.cuh"
#include "threads.cuh"
#include "tile.cuh"

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
// most distant lanes come first, which continues the order of PackSums (reduce.cuh).
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

// The sum of one pack, or of its deviations from origin, and of its squares. Each pack has its own
// chain of additions, so that packs overlap.
template <int pack_size, class Compute>
__device__ __forceinline__ Compute sum_of(const Compute (&values)[pack_size], Compute origin = 0) {
  Compute sums[pack_size];
#pragma unroll
  for (int at = 0; at < pack_size; ++at) sums[at] = values[at] - origin;
#pragma unroll
  for (int width = pack_size / 2; width > 0; width /= 2) {
#pragma unroll
    for (int at = 0; at < width; ++at) sums[at] += sums[at + width];
  }
  return sums[0];
}
// A value whose square overflows is no help as an origin.
template <class Compute>
__device__ __forceinline__ Compute usable_origin(Compute value) {
  constexpr Compute largest = 0x1p63f;
  return value < largest && value > -largest ? value : Compute(0);
}
template <int pack_size, class Compute>
__device__ __forceinline__ Compute squares_of(const Compute (&values)[pack_size]) {
  Compute squares = values[0] * values[0];
#pragma unroll
  for (int at = 1; at < pack_size; ++at) squares += values[at] * values[at];
  return squares;
}

// count, mean and sum of squared deviations of some values of a row: Welford's statistics, merged
// pairwise (Chan, Golub, LeVeque 1979).
template <class Compute>
struct Moments {
  static constexpr int size = 3;
  static constexpr bool ordered = true, is_maximum = false;
  Compute part[3];

  __device__ __forceinline__ void merge(const Moments& other) {
    const Compute count = part[0] + other.part[0];
    const Compute share = count > 0 ? other.part[0] / count : Compute(0);
    const Compute delta = other.part[1] - part[1];
    part[1] += delta * share;
    // In this order, because an infinite square times the zero of an empty side would be NaN.
    part[2] += other.part[2] + delta * (part[0] * share) * delta;
    part[0] = count;
  }

  template <int pack_size>
  __device__ __forceinline__ static Moments of(const Compute (&values)[pack_size]) {
    // Relative to the first value, so that equal values give exactly that value and zero.
    Compute shifted = 0;
#pragma unroll
    for (int at = 1; at < pack_size; ++at) shifted += values[at] - values[0];
    const Compute mean = values[0] + shifted * (Compute(1) / pack_size);
    Compute squares = 0;
#pragma unroll
    for (int at = 0; at < pack_size; ++at) squares += (values[at] - mean) * (values[at] - mean);
    return {{Compute(pack_size), mean, squares}};
  }
};

// Adds up one value a pack, in the order in which twice as many lanes with half as many packs
// would: even packs, odd packs, and so on within both. So a row can get more lanes where rows are
// few, and the sum keeps every bit. num_packs: 0 adds one value after the other.
template <class Value, int num_packs>
struct PackSums {
  Value of_pack[num_packs];
  int pack = 0;

  __device__ __forceinline__ void add(const Value& value) { of_pack[pack++] = value; }
  __device__ __forceinline__ Value total() const { return total_of<0, 1, num_packs>(); }

 private:
  template <int first, int step, int count>
  __device__ __forceinline__ Value total_of() const {
    if constexpr (count % 2 == 0) {
      Value total = total_of<first, 2 * step, count / 2>();
      total.merge(total_of<first + step, 2 * step, count / 2>());
      return total;
    } else {
      Value total = of_pack[first];
#pragma unroll
      for (int at = 1; at < count; ++at) total.merge(of_pack[first + at * step]);
      return total;
    }
  }
};
template <class Value>
struct PackSums<Value, 0> {
  Value sum{};

  __device__ __forceinline__ void add(const Value& value) { sum.merge(value); }
  __device__ __forceinline__ Value total() const { return sum; }
};
