// broadcast.cuh -- four floats of a row, from the warp that computed them to all warps of its block
//
// Two buffers are enough. The statistics of turn t + 2 are computed when all warps have sent their
// moments of that turn. A warp sends these after it has received the broadcast of turn t.
#pragma once
#include "bulk.cuh"
#include "ring_shape.cuh"

template <Tile tile>
struct Broadcast {
  static constexpr int group_bytes = 2 * (sizeof(float4) + sizeof(unsigned long long));
  static constexpr int smem_bytes = tile.rows_per_block * group_bytes;

  float4* buffers;               // [2]
  unsigned long long* barriers;  // [2]

  // The caller synchronises the block before the first receive. smem: 16-byte aligned
  __device__ __forceinline__ explicit Broadcast(unsigned char* smem)
      : buffers(reinterpret_cast<float4*>(smem + RingShape<tile>::group() * group_bytes)),
        barriers(reinterpret_cast<unsigned long long*>(buffers + 2)) {
    if (RingShape<tile>::thread() == 0) {
      bulk_barrier_init(barriers);
      bulk_barrier_init(barriers + 1);
    }
  }

  // Called by one thread.
  __device__ __forceinline__ void send(unsigned turn, const float4& values) const {
    const int buffer = static_cast<int>(turn % 2);
    buffers[buffer] = values;
    bulk_arrive(barriers + buffer);
  }
  __device__ __forceinline__ float4 receive(unsigned turn) const {
    const int buffer = static_cast<int>(turn % 2);
    bulk_wait(barriers + buffer, turn / 2);
    return buffers[buffer];
  }
};
