// several_sums.cuh -- norm_linear_several.cu: the blocks of a cluster add up their sums of a tile
#pragma once
#include "convert.cuh"
#include "several_memory.cuh"

// The sums of a warpgroup's outputs, each of one block's columns. Each block adds up, of all
// blocks, those of as many neighbouring outputs, in the order of the blocks.
struct SharedSums {
  const SeveralMemory& memory;
  const SeveralPart& part;
  const int group, own_outputs;  // own_outputs: of each block

  __device__ __forceinline__ SharedSums(const SeveralMemory& memory, const SeveralPart& part,
                                        int tile_outputs)
      : memory(memory),
        part(part),
        group(threadIdx.x / 128),
        own_outputs(max(0, min(group_outputs, tile_outputs - group * group_outputs)) /
                    cluster_size) {}

  // Of the thread's outputs, for the first block of a cluster.
  template <class T, class Call>
  __device__ __forceinline__ void load_bias(float (&bias)[2], const Call& call, int tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long output = part.first_output(call, tile) + group * group_outputs +
                               threadIdx.x / 32 % 4 * 16 + half * 8 + threadIdx.x % 32 / 4;
      float value[1] = {0.0f};
      if (call.bias != nullptr && part.rank == 0 && output < call.out_features)
        unpack(load_pack<1>(call.bias + output), value);
      bias[half] = value[0];
    }
  }
  // To the sums of two tiles before, which all have read: their sums of the last tile have arrived.
  __device__ __forceinline__ void send(const float (&d)[16], const float (&bias)[2],
                                       int tile) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (tile > 0) bulk_wait(&memory.head.added[group], tile - 1);
    unsigned long long* received = &memory.head.received[group][tile % 2];
    if (threadIdx.x % 128 == 0) bulk_expect(received, cluster_size * own_outputs * most_rows * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = warp * 16 + half * 8 + lane / 4, owner = output / own_outputs;
      if (owner >= cluster_size) break;
      const float* own = d + half * 2;
      const float4 values = make_float4(own[0] + bias[half], own[1] + bias[half],
                                        own[4] + bias[half], own[5] + bias[half]);
      cluster_send_four(unit(tile, part.rank, output % own_outputs, lane % 4), values, received,
                        owner);
    }
  }

  // y of the outputs that this block adds up.
  template <class T, class Call>
  __device__ __forceinline__ void write(const Call& call, int tile) const {
    const long long first = part.first_output(call, tile) + group * group_outputs +
                            static_cast<long long>(part.rank) * own_outputs;
    bulk_wait(&memory.head.received[group][tile % 2], tile / 2);
    for (int at = threadIdx.x % 128; at < own_outputs * 4; at += 128) {
      const int output = at % own_outputs, place = at / own_outputs;
      if (first + output >= call.out_features) continue;
      Sum<float, 4> sum{};
#pragma unroll
      for (int rank = 0; rank < cluster_size; ++rank) {
        const auto of_block = *reinterpret_cast<float4*>(unit(tile, rank, output, place));
        sum.merge({{of_block.x, of_block.y, of_block.z, of_block.w}});
      }
#pragma unroll
      for (int each = 0; each < 4; ++each) {
        const int row = place * 2 + each / 2 * 8 + each % 2;
        const float value[1] = {sum.part[each]};
        if (row < memory.num_rows)
          store_pack<1>(call.y + row * call.out_features + first + output, repack<T>(value));
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) bulk_arrive(&memory.head.added[group]);
  }

 private:
  // Four sums of an output: of rows 2 place, the next, and those 8 further.
  __device__ __forceinline__ float* unit(int tile, int rank, int output, int place) const {
    return memory.sums_of(group, tile) + ((rank * own_outputs + output) * 4 + place) * 4;
  }
};
