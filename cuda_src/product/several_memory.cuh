// several_memory.cuh -- norm_linear_several.cu: the work of a block, and its shared memory
#pragma once
#include "cluster.cuh"
#include "tensor_tile.cuh"
#include "warp_moments.cuh"

// A tile is tile_outputs rows of the weight. Two warpgroups multiply it, 64 outputs each, in steps
// of step_cols columns. One warp loads. All others normalise the rows first.
constexpr int step_cols = 64, group_outputs = 64, num_multiplying_groups = 2;
constexpr int num_normalizing_warps = 16, loading_warp = num_normalizing_warps;
constexpr int several_threads = (loading_warp + 1) * 32;
constexpr int most_rows = 16, most_stages = 40;
constexpr int cluster_size = 2;
constexpr int line_bytes = step_cols * 2;  // of one row in one step

// A cluster has one tile of outputs after the other, and each of its blocks some of the columns.
struct SeveralPart {
  const int cluster, rank, num_clusters, first_col;
  int num_cols, num_steps, num_tiles;  // of this block

  template <class Call>
  __device__ __forceinline__ explicit SeveralPart(const Call& call)
      : cluster(blockIdx.x / cluster_size),
        rank(blockIdx.x % cluster_size),
        num_clusters(gridDim.x / cluster_size),
        first_col(rank * static_cast<int>(call.most_steps) * step_cols) {
    num_cols = cols_of(call, rank);
    num_steps = (num_cols + step_cols - 1) / step_cols;
    num_tiles = (static_cast<int>(call.num_tiles) - cluster + num_clusters - 1) / num_clusters;
  }
  // Of a block of this cluster.
  template <class Call>
  __device__ __forceinline__ static int cols_of(const Call& call, int rank) {
    const int most = static_cast<int>(call.most_steps) * step_cols;
    return max(0, min(most, static_cast<int>(call.in_features) - rank * most));
  }
  // Of all outputs, the first one of a tile.
  template <class Call>
  __device__ __forceinline__ long long first_output(const Call& call, int tile) const {
    return (cluster + static_cast<long long>(tile) * num_clusters) * call.tile_outputs;
  }
};

struct SeveralHead {
  unsigned long long loaded[most_stages], multiplied[most_stages];
  unsigned long long received[num_multiplying_groups][2], added[num_multiplying_groups], measured;
  Deviations deviations[cluster_size][most_rows];  // of the columns of each block
  float2 mean_rstd[most_rows];

  // By one warp. num_groups: of those that multiply.
  __device__ __forceinline__ void make_barriers(int num_stages, int num_groups) {
    const int lane = threadIdx.x % 32;
    for (int at = lane; at < num_stages; at += 32) {
      bulk_barrier_init(&loaded[at]);
      bulk_barrier_init(&multiplied[at], num_groups * 4);
    }
    if (lane < num_multiplying_groups) {
      bulk_barrier_init(&received[lane][0]);
      bulk_barrier_init(&received[lane][1]);
      bulk_barrier_init(&added[lane], 4);
    }
    if (lane == 0) bulk_barrier_init(&measured);
    __syncwarp();
  }
};
constexpr int head_bytes = 8192;
static_assert(sizeof(SeveralHead) <= head_bytes);

struct SeveralMemory {
  SeveralHead& head;
  unsigned char* const steps;  // of x: [most_steps][a multiple of 8 rows][line_bytes], swizzled
  const int num_rows, step_bytes, stage_bytes, num_stages;
  unsigned char* const stages;  // of the weight: [num_stages][stage_bytes], swizzled
  float* const sums;            // [num_multiplying_groups][2][group_outputs][most_rows]

  template <class Call>
  __device__ __forceinline__ SeveralMemory(unsigned char* smem, const Call& call)
      : head(*reinterpret_cast<SeveralHead*>(smem)),
        steps(smem + head_bytes),
        num_rows(call.num_rows),
        step_bytes((num_rows + 7) / 8 * 8 * line_bytes),
        stage_bytes(call.tile_outputs * line_bytes),
        num_stages(call.num_stages),
        stages(steps + call.most_steps * step_bytes),
        sums(reinterpret_cast<float*>(stages + num_stages * stage_bytes)) {}

  __device__ __forceinline__ unsigned char* stage(int at) const {
    return stages + at * stage_bytes;
  }
  __device__ __forceinline__ float* sums_of(int group, int tile) const {
    return sums + (group * 2 + tile % 2) * group_outputs * most_rows;
  }
};

// A place in the ring of stages, and how often the ring was full before.
struct RingPlace {
  int stage = 0, turn = 0;
  __device__ __forceinline__ void next(int num_stages) {
    if (++stage == num_stages) stage = 0, ++turn;
  }
};
