// column_sums.cuh -- sums of columns over the groups of threads of a block, in a fixed order
#pragma once

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
