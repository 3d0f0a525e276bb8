// product_rows.cuh -- norm_linear.cu: a warpgroup's 64 rows of x times the weight, and its results
#pragma once
#include "column_terms.cuh"
#include "product_tiles.cuh"
#include "row_statistics.cuh"
#include "warpgroup.cuh"

// Says that this warp has done with a stage, to each block that loads into it.
template <int cluster_size>
__device__ __forceinline__ void release(ProductMemory& memory, unsigned stage) {
  unsigned long long* multiplied = &memory.multiplied[stage];
  const unsigned lane = threadIdx.x % 32;
  if constexpr (cluster_size == 1) {
    if (lane == 0) bulk_arrive(multiplied);
  } else {
    if (lane < cluster_size) arrive_in(multiplied, lane);
  }
}

// What a warp does with a tile that it does not compute: it gives back each stage.
template <int cluster_size>
__device__ __forceinline__ void pass_rows(unsigned num_steps, ProductMemory& memory,
                                          unsigned& step) {
  for (unsigned at = 0; at <= num_steps; ++at, ++step) {
    bulk_wait(&memory.loaded[step % num_stages], step / num_stages);
    __syncwarp();
    release<cluster_size>(memory, step % num_stages);
  }
}

// One step of d = x weight^T, whose products are not waited for, but for those of the step before.
// at: the step of the tile; step: of all steps.
template <class T, int cluster_size>
__device__ __forceinline__ void multiply_step(float (&d)[128], ProductMemory& memory, unsigned at,
                                              unsigned step) {
  const unsigned group = threadIdx.x / threads_per_group - 1, stage = step % num_stages;
  bulk_wait(&memory.loaded[stage], step / num_stages);
  const unsigned long long x = product_operand(memory.x(stage) + group * group_bytes),
                           weight = product_operand(memory.weight(stage));
  products_begin();
#pragma unroll
  for (int part = 0; part < step_cols / 16; ++part)
    multiply<T>(d, x + part * 2, weight + part * 2, at > 0 || part > 0);
  products_commit();
  products_wait<1>();
  if (at > 0) release<cluster_size>(memory, (step - 1) % num_stages);
}

// The last step: the terms of the columns, for rows with these statistics. d: then y / rstd.
template <int cluster_size>
__device__ __forceinline__ void add_terms(float (&d)[128], const TwoRows& rows,
                                          ProductMemory& memory, unsigned step) {
  unsigned a[4];
#pragma unroll
  for (int at = 0; at < 2; ++at) {
    a[at] = row_word(-rows.mean[at], threadIdx.x % 4);
    a[2 + at] = row_word(1.0f / rows.rstd[at], threadIdx.x % 4);
  }
  const unsigned stage = step % num_stages;
  bulk_wait(&memory.loaded[stage], step / num_stages);
  products_begin();
  multiply<__nv_bfloat16>(d, a, product_operand<32>(memory.x(stage)), true);
  products_commit();
  products_wait<1>();
  release<cluster_size>(memory, (step - 1) % num_stages);
  products_wait<0>();
  release<cluster_size>(memory, stage);
}

// Results wait in registers, rounded, and are written a part at a time, while tensor cores compute
// the next tile. fold_weight.cu orders the columns so that a lane has 8 adjacent ones of each 32.
template <class T>
struct Results {
  static constexpr int num_parts = 4, packs_of_part = block_cols / 32 / num_parts;
  Pack<T, 8> packs[num_parts][packs_of_part][2];  // the last index: which of the lane's two rows
  int row, col;  // of y, the warp's first ones; col: at first beyond the last one

  // d: as multiply leaves it. rows: of the lane.
  __device__ __forceinline__ void take(const float (&d)[128], const TwoRows& rows) {
#pragma unroll
    for (int at = 0; at < num_parts * packs_of_part * 2; ++at) {
      float values[8];
#pragma unroll
      for (int col = 0; col < 8; ++col)
        values[col] = d[at / 2 * 16 + col / 2 * 4 + at % 2 * 2 + col % 2] * rows.rstd[at % 2];
      packs[at / 2 / packs_of_part][at / 2 % packs_of_part][at % 2] = repack<T>(values);
    }
  }
  __device__ __forceinline__ void write(int part, T* y, long long num_rows,
                                        long long num_cols) const {
    const int lane = threadIdx.x % 32;
    const long long first = row + lane / 4;
    const int own = col + part * packs_of_part * 32 + lane % 4 * 8;
    y += first * num_cols + own;
#pragma unroll
    for (int at = 0; at < num_parts; ++at) {
      if (at != part) continue;
#pragma unroll
      for (int pack = 0; pack < packs_of_part; ++pack)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (first + half * 8 < num_rows && own + pack * 32 < num_cols)
            store_pack<8>(y + half * 8 * num_cols + pack * 32, packs[at][pack][half]);
    }
  }
};
