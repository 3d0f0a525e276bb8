// normalized_rows.cuh -- norm_linear_few.cu: the rows, normalised in the block's shared memory
#pragma once
#include "normalized_packs.cuh"
#include "weight_units.cuh"

// A thread has every num_threads-th pack of each row, from load to normalize.
template <class T, bool centered, int num_rows>
struct NormalizedRows {
  static constexpr int num_threads = num_warps * 32;
  Moments<float>* moments;  // [num_rows][num_warps]
  T* rows;                  // [num_rows][padded_cols], 0 beyond num_cols
  const int num_cols, padded_cols;

  __device__ __forceinline__ NormalizedRows(unsigned char* smem, int num_cols, int num_parts)
      : moments(reinterpret_cast<Moments<float>*>(smem)),
        rows(reinterpret_cast<T*>(moments + num_rows * num_warps)),
        num_cols(num_cols),
        padded_cols(num_parts * part_cols) {}
  __device__ __forceinline__ T* at(int row, int col) const {
    return rows + row * padded_cols + col;
  }
  __device__ __forceinline__ float* end() const {
    return reinterpret_cast<float*>(at(num_rows, 0));
  }

  // f(pack, col) for the thread's packs of a row, where they are in shared memory.
  template <class F>
  __device__ __forceinline__ void for_each_own(int row, F f) const {
#pragma unroll 1
    for (int col = threadIdx.x * 8; col < num_cols; col += num_threads * 8) f(at(row, col), col);
  }
  __device__ __forceinline__ void load(const AddedRows<T>& added) const {
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      if (added.residual == nullptr) {
        for_each_own(row, [&](T* pack, int col) {
          async_copy<8>(pack, added.x + static_cast<long long>(row) * num_cols + col);
        });
      }
      for (int col = num_cols + threadIdx.x * 8; col < padded_cols; col += num_threads * 8)
        store_pack<8>(at(row, col), Pack<T, 8>{});
    }
    if (added.residual != nullptr) {
      const int packs_of_row = (num_cols + num_threads * 8 - 1) / (num_threads * 8);
      added.template add_all<2>(num_rows * packs_of_row, blockIdx.x == 0, [&](int pack, auto f) {
        const int row = pack / packs_of_row;
        const int col = (pack % packs_of_row * num_threads + static_cast<int>(threadIdx.x)) * 8;
        if (row < num_rows && col < num_cols)
          f(at(row, col), static_cast<long long>(row) * num_cols + col);
      });
    }
    async_commit();
  }

  __device__ __forceinline__ Moments<float> moments_of(int row) const {
    const int num_packs = num_cols / 8, rest = num_packs % num_threads;
    const int first = threadIdx.x / 32 * 32, of_rest = max(0, min(rest - first, 32));
    const int count = (num_packs / num_threads * 32 + of_rest) * 8;
    const int col = static_cast<int>(threadIdx.x) * 8;
    float sample[8] = {};
    if (col < num_cols) unpack(load_pack<8>(at(row, col)), sample);
    return moments_of_packs<centered>(sample, col < num_cols, count, [&](auto f) {
      for_each_own(row, [&](const T* pack, int) {
        float values[8];
        unpack(load_pack<8>(pack), values);
        f(values);
      });
    });
  }

  template <class Call>
  __device__ __forceinline__ void normalize(const Call& call) const {
    const int lane = threadIdx.x % 32;
    async_wait<0>();
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const Moments<float> found = moments_of(row);
      if (lane == 0) moments[row * num_warps + threadIdx.x / 32] = found;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < num_rows; ++row) {
      const Moments<float> of_warp =
          lane < num_warps ? moments[row * num_warps + lane] : Moments<float>{};
      const float2 found = mean_rstd_of<centered, 32>(of_warp, num_cols, call.eps);
      if (blockIdx.x == 0 && threadIdx.x == 0) save_mean_rstd(call, row, found);
      for_each_own(row,
                   [&](T* pack, int col) { normalize_pack<centered>(pack, col, found, call); });
    }
    __syncthreads();
  }
};
