// sums.cuh -- sums of a thread's own packs, before threads exchange them
#pragma once
#include "reduce.cuh"

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
