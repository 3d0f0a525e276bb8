// exchange.cuh -- sums that warps of a block or cluster exchange without stopping it
//
// Each warp that shares a row sends one to three floats to all of these warps, which read them a
// turn later. The lower half of a warp's lanes has the first value, the upper half the second.
//
// Four buffers are enough. A warp sends for turn t + 4 when all values of turn t + 2 have arrived
// in its block. Every warp sends those after it has read the values of turn t.
#pragma once
#include "bulk.cuh"
#include "reduce.cuh"
#include "ring.cuh"

// Whether this lane has the second of two values.
__device__ __forceinline__ bool has_second() { return threadIdx.x & 16; }

// Sums two values over a warp with one shuffle more than one sum takes. Each half of the lanes gets
// its own sum.
__device__ __forceinline__ float warp_reduce_two(float first, float second) {
  const float other = has_second() ? first : second;
  const float kept = has_second() ? second : first;
  return warp_sum<16>(kept + __shfl_xor_sync(0xffffffffu, other, 16));
}
// Returns the values of both halves to all lanes.
__device__ __forceinline__ Sum<float, 2> both_halves(float own) {
  return {{__shfl_sync(0xffffffffu, own, 0), __shfl_sync(0xffffffffu, own, 16)}};
}

template <Tile tile, int num_values = 2>
struct Exchange {
  using Shape = RingShape<tile>;
  static constexpr int num_sources = Shape::num_warps * tile.cluster_size;
  static constexpr bool has_third = num_values == 3;
  static constexpr int num_buffers = 4;
  static constexpr int group_bytes =
      num_buffers * (num_values * num_sources * sizeof(float) + sizeof(unsigned long long));
  static constexpr int smem_bytes = tile.rows_per_block * group_bytes;

  unsigned long long* barriers;
  float* buffers;  // [num_buffers][num_values][num_sources]

  // The caller synchronises the block, and the cluster, before the first send.
  __device__ __forceinline__ explicit Exchange(unsigned char* smem)
      : barriers(reinterpret_cast<unsigned long long*>(smem + Shape::group() * group_bytes)),
        buffers(reinterpret_cast<float*>(barriers + num_buffers)) {
    if (Shape::thread() == 0) {
      for (int buffer = 0; buffer < num_buffers; ++buffer) {
        bulk_barrier_init(barriers + buffer, tile.threads_per_row + (tile.cluster_size > 1));
        expect(buffer);
      }
    }
  }

  // Called by all lanes of a warp, each half with its own value. Every lane arrives at the barrier:
  // its arrival for turn t + 2 orders its own reads of turn t before the writes of turn t + 4. One
  // arrival a warp, after a __syncwarp, would be slower, and racecheck does not see that order.
  __device__ __forceinline__ void send(unsigned turn, float value) const {
    send_value(turn, has_second(), value);
    bulk_arrive(barriers + turn % num_buffers);
  }
  // Sends one value alone, the same in all lanes.
  __device__ __forceinline__ void send_alone(unsigned turn, float value) const {
    static_assert(num_values == 1, "a wait ends when all values have arrived");
    if (!has_second()) send_value(turn, 0, value);
    bulk_arrive(barriers + turn % num_buffers);
  }
  // Sends a third value, the same in all lanes. Called before send.
  __device__ __forceinline__ void send_third(unsigned turn, float value) const {
    if (!has_second()) send_value(turn, 2, value);
  }
  // expects: whether this thread announces the bytes of the next values, those of turn + 4.
  __device__ __forceinline__ void wait(unsigned turn, bool expects) const {
    bulk_wait(barriers + turn % num_buffers, turn / num_buffers);
    // This is early enough: no warp sends them before this thread has sent for turn + 2.
    if (expects) expect(turn % num_buffers);
  }

  // `lanes` neighbouring lanes share out the sources, the warps that sent. Each has up to three
  // before another lane is used, because an addition is faster than a shuffle.
  static constexpr int lanes = num_values == 1    ? 32
                               : num_sources > 48 ? 16
                                                  : power_of_two_from((num_sources + 2) / 3);
  static constexpr int sources_per_lane = (num_sources + lanes - 1) / lanes;
  __device__ __forceinline__ static int source(int index) {
    return index * lanes + static_cast<int>(threadIdx.x) % lanes;
  }
  // f(index) for each source of this lane, of which received() is value number `which`.
  template <class F>
  __device__ __forceinline__ static void for_each_source(F f) {
#pragma unroll
    for (int index = 0; index < sources_per_lane; ++index) {
      if (num_sources % lanes == 0 || source(index) < num_sources) f(index);
    }
  }
  __device__ __forceinline__ float received(unsigned turn, int which, int index) const {
    return buffer(turn)[which * num_sources + source(index)];
  }
  // All that the warps send in a turn: [num_values][num_sources].
  __device__ __forceinline__ float* buffer(unsigned turn) const {
    return buffers + num_values * static_cast<int>(turn % num_buffers) * num_sources;
  }
  // The sums of two values over all sources, to all lanes.
  __device__ __forceinline__ static Sum<float, 2> total(const float* buffer) {
    float sum = 0;
    for_each_source([&](int index) { sum += buffer[has_second() * num_sources + source(index)]; });
    return both_halves(warp_sum<lanes>(sum));
  }

 private:
  __device__ __forceinline__ void send_value(unsigned turn, int which, float value) const {
    const unsigned lane = threadIdx.x % 16;
    float* at = buffer(turn) + which * num_sources + Shape::thread() / 32;
    if constexpr (tile.cluster_size > 1) {
      if (lane < tile.cluster_size)
        cluster_send(at + cluster_rank() * Shape::num_warps, value, barriers + turn % num_buffers,
                     lane);
    } else if (lane == 0) {
      *at = value;
    }
  }
  __device__ __forceinline__ void expect(int buffer) const {
    if constexpr (tile.cluster_size > 1) {
      bulk_expect(barriers + buffer,
                  num_values * num_sources * static_cast<unsigned>(sizeof(float)));
    }
  }
};
