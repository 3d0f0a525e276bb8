// product_rows.cuh -- norm_linear.cu: a warp's 16 rows of x times the weight
//
// Of a step a warp has its fragments of x in registers and multiplies them by the tile of weight in
// shared memory. The product of one step runs while the fragments of the next one are fetched and
// their sums made.
#pragma once
#include "column_terms.cuh"
#include "fragment_sums.cuh"
#include "product_tiles.cuh"
#include "warpgroup_product.cuh"

constexpr int fragments_of_step = step_cols / 16;

// What a warp multiplies. It must outlive the products that are not waited for.
using Fragments = unsigned[fragments_of_step][4];

// x: the warp's rows in a tile, of which each lane addresses one unit of 16 bytes.
__device__ __forceinline__ void load_fragments(Fragments& a, const unsigned char* x) {
  const unsigned row = threadIdx.x % 16, unit = threadIdx.x % 32 / 16;
#pragma unroll
  for (int at = 0; at < fragments_of_step; ++at)
    load_fragment(a[at], x + row * 128 + ((at * 2 + unit) ^ (row & 7)) * 16);
}

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
__device__ __forceinline__ void pass_rows(long long in_features, ProductMemory& memory,
                                          unsigned& step) {
  const unsigned num_steps = (in_features + step_cols - 1) / step_cols;
  for (unsigned at = 0; at <= num_steps; ++at, ++step) {
    bulk_wait(&memory.loaded[step % num_stages], step / num_stages);
    release<cluster_size>(memory, step % num_stages);
  }
}

// Begins d = x weight^T, whose last products are not waited for: finish_rows does. finds: also the
// sums of x. step: of all steps, the next one.
template <int cluster_size, class T, bool centered>
__device__ __forceinline__ void begin_rows(float (&d)[128], Fragments (&a)[2],
                                           FragmentSums<T, centered>& sums, bool finds,
                                           long long in_features, ProductMemory& memory,
                                           unsigned& step) {
  const unsigned warp = threadIdx.x / 32 - threads_per_group / 32;
  const unsigned num_steps = (in_features + step_cols - 1) / step_cols;
#pragma unroll 1
  for (unsigned first = 0; first < num_steps; first += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned at = first + half;
      if (at == num_steps) break;
      const unsigned stage = step % num_stages;
      bulk_wait(&memory.loaded[stage], step / num_stages);
      load_fragments(a[half], memory.x(stage) + warp * 16 * 128);
      if (finds) {
        if (at == 0) sums.begin(a[half][0]);
        sums.add(a[half], in_features - static_cast<long long>(at) * step_cols);
      }
      const unsigned long long weight = product_operand(memory.weight(stage));
      products_begin();
#pragma unroll
      for (int part = 0; part < fragments_of_step; ++part)
        multiply<T>(d, a[half][part], weight + part * 2, at > 0 || part > 0);
      products_commit();
      products_wait<1>();
      if (at > 0) release<cluster_size>(memory, (step - 1) % num_stages);
      ++step;
    }
  }
}

// The last step: the terms of the columns, for rows with these statistics. d: then y / rstd.
template <int cluster_size>
__device__ __forceinline__ void begin_terms(float (&d)[128], unsigned (&a)[4], const TwoRows& rows,
                                            ProductMemory& memory, unsigned& step) {
#pragma unroll
  for (int at = 0; at < 2; ++at) {
    a[at] = row_word(-rows.mean[at], threadIdx.x % 4);
    a[2 + at] = row_word(1.0f / rows.rstd[at], threadIdx.x % 4);
  }
  const unsigned stage = step % num_stages;
  bulk_wait(&memory.loaded[stage], step / num_stages);
  products_begin();
  multiply<__nv_bfloat16>(d, a, product_operand(memory.weight(stage)), true);
  products_commit();
  products_wait<1>();
  release<cluster_size>(memory, (step - 1) % num_stages);
  ++step;
}

template <int cluster_size>
__device__ __forceinline__ void finish_rows(ProductMemory& memory, unsigned step) {
  products_wait<0>();
  release<cluster_size>(memory, (step - 1) % num_stages);
}
