// normalized_rows.cuh -- norm_linear_few.cu: the rows, normalised in the block's shared memory
#pragma once
#include "memory.cuh"
#include "parameter.cuh"
#include "reduce.cuh"
#include "statistics.cuh"
#include "sum_load.cuh"

// A warp multiplies one part of the columns, unit_packs packs of 8 in each lane, of which the
// lanes' neighbouring ones make lines of 512 bytes.
constexpr int num_warps = 16, unit_packs = 4, part_cols = unit_packs * 32 * 8;

// Moments of `count` values. deviations: the sums of (value - first)^2 and of value - first.
__device__ __forceinline__ Moments<float> corrected_moments(float count, float first,
                                                            const Sum<float, 2>& deviations) {
  const float rest = deviations.part[1] * (1.0f / count), excess = deviations.part[1] * rest;
  // Leaves out an excess that overflowed.
  const float squares = excess - excess == 0 ? deviations.part[0] - excess : deviations.part[0];
  return {{count, first + rest, squares < 0 ? 0 : squares}};
}

struct Deviations {
  float first;
  Sum<float, 2> sums;  // of (value - first)^2 and of value - first
};

// The deviations of a warp's values, of which there is one or more. first: the mean of a sample,
// one pack of each lane that `samples`. Few digits cancel: if a share s of the values is sampled,
// the squares add up to at most 1 + 1 / s times those of the centred values. Equal values give
// exactly that value and zero, because the sample's mean is found from deviations from one value,
// the origin. for_each(f): f(values) for each pack of this thread.
template <int pack_size, class ForEach>
__device__ __forceinline__ Deviations warp_deviations(const float (&sample)[pack_size],
                                                      bool samples, int num_cols,
                                                      ForEach for_each) {
  const float origin = usable_origin(__shfl_sync(0xffffffffu, sample[0], 0));
  const float of_sample = warp_sum<32>(samples ? sum_of(sample, origin) : 0.0f);
  const float num_sampled = static_cast<float>(min(num_cols, 32 * pack_size));
  const float first = origin + divide(of_sample, num_sampled, 1.0f / num_sampled);
  Sum<float, 2> deviations{};
  for_each([&](const auto& values) {
    float centered_values[pack_size];
#pragma unroll
    for (int at = 0; at < pack_size; ++at) centered_values[at] = values[at] - first;
    deviations.part[0] += squares_of(centered_values);
    deviations.part[1] += sum_of(centered_values);
  });
  return {first, warp_reduce<32>(deviations)};
}
template <int pack_size, class ForEach>
__device__ __forceinline__ Moments<float> warp_moments(const float (&sample)[pack_size],
                                                       bool samples, int num_cols,
                                                       ForEach for_each) {
  if (num_cols == 0) return {};
  const Deviations found = warp_deviations(sample, samples, num_cols, for_each);
  return corrected_moments(static_cast<float>(num_cols), found.first, found.sums);
}

// The total of `count` parts in each of `lanes` lanes, to all of them. Moments are not merged in
// pairs, which would take a division for each pair. An empty part has a count of 0.
template <int lanes = 32, int count>
__device__ __forceinline__ Moments<float> total_of(const Moments<float> (&parts)[count]) {
  Sum<float, 2> sums{};
#pragma unroll
  for (int at = 0; at < count; ++at) {
    sums.part[0] += parts[at].part[0];
    sums.part[1] += parts[at].part[0] * parts[at].part[1];
  }
  sums = warp_reduce<lanes>(sums);
  const float first = divide(sums.part[1], sums.part[0], 1.0f / sums.part[0]);
  Sum<float, 2> deviations{};
#pragma unroll
  for (int at = 0; at < count; ++at) {
    const float distance = parts[at].part[1] - first;
    const float weighed = parts[at].part[0] * distance;
    deviations.part[0] += parts[at].part[2] + weighed * distance;
    deviations.part[1] += weighed;
  }
  return corrected_moments(sums.part[0], first, warp_reduce<lanes>(deviations));
}
template <int lanes = 32, int num_parts, int count>
__device__ __forceinline__ Sum<float, num_parts> total_of(
    const Sum<float, num_parts> (&parts)[count]) {
  Sum<float, num_parts> total = parts[0];
#pragma unroll
  for (int at = 1; at < count; ++at) total.merge(parts[at]);
  return warp_reduce<lanes>(total);
}

// x and, if there is one, a residual, on their way to shared memory.
template <class T>
struct AddedRows {
  const T* x;         // [num_rows, num_cols], contiguous; so too the others
  const T* residual;  // null: absent
  T* sum;             // x + residual, rounded. null: not wanted

  struct Begun {
    Pack<T, 8> packs[2];
  };
  __device__ __forceinline__ Begun begin(long long at) const {
    return {{load_pack<8>(x + at), load_pack<8>(residual + at)}};
  }
  // keeps_sum: whether this thread writes the sum.
  __device__ __forceinline__ void add(T* smem, long long at, const Begun& begun,
                                      bool keeps_sum) const {
    const Pack<T, 8> added = ResidualLoad<T>::combine(begun.packs);
    if (keeps_sum && sum != nullptr) store_pack<8>(sum + at, added);
    store_pack<8>(smem, added);
  }
  // find(pack, f): f(smem, at) if this thread has the pack. The loads of `batch` packs begin
  // before the first sum is written.
  template <int batch, class Find>
  __device__ __forceinline__ void add_all(int num_packs, bool keeps_sum, Find find) const {
    Begun begun[batch];
#pragma unroll 1
    for (int first = 0; first < num_packs; first += batch) {
#pragma unroll
      for (int each = 0; each < batch; ++each)
        find(first + each, [&](T*, long long at) { begun[each] = begin(at); });
#pragma unroll
      for (int each = 0; each < batch; ++each)
        find(first + each, [&](T* smem, long long at) { add(smem, at, begun[each], keeps_sum); });
    }
  }
};

// Of a warp's packs of a row. sample, samples, for_each: as of warp_moments. RMSNorm: the sum of
// squares alone.
template <bool centered, class ForEach>
__device__ __forceinline__ Moments<float> moments_of_packs(const float (&sample)[8], bool samples,
                                                           int num_cols, ForEach for_each) {
  if constexpr (centered) {
    return warp_moments(sample, samples, num_cols, for_each);
  } else {
    Sum<float, 1> squares{};
    for_each([&](const auto& values) { squares.part[0] += squares_of(values); });
    return {{0.0f, 0.0f, warp_reduce<32>(squares).part[0]}};
  }
}

// Of a row, from the moments of its parts, one in each lane.
template <bool centered, int lanes>
__device__ __forceinline__ float2 mean_rstd_of(const Moments<float>& of_lane, int num_cols,
                                               double eps) {
  const Moments<float> parts[1] = {of_lane};
  Moments<float> total{};
  if constexpr (centered)
    total = total_of<lanes>(parts);
  else
    total.part[2] = warp_reduce<lanes>(Sum<float, 1>{{of_lane.part[2]}}).part[0];
  return make_float2(total.part[1], uncentered(total.part[2], 1.0f / num_cols, eps).rstd);
}

template <bool centered, class T>
__device__ __forceinline__ Pack<T, 8> normalized(const Pack<T, 8>& pack, const float2& mean_rstd,
                                                 const float (&scales)[8],
                                                 const float (&biases)[8]) {
  float values[8];
  unpack(pack, values);
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const float value = centered ? values[at] - mean_rstd.x : values[at];
    values[at] = fma(value * mean_rstd.y, scales[at], biases[at]);
  }
  return repack<T>(values);
}
// col: in the row. call: has norm_weight and norm_bias.
template <bool centered, class T, class Call>
__device__ __forceinline__ void normalize_pack(T* pack, int col, const float2& mean_rstd,
                                               const Call& call) {
  float scales[8], biases[8];
  call.norm_weight.template load<8>(col, scales);
  call.norm_bias.template load<8>(col, biases);
  store_pack<8>(pack, normalized<centered>(load_pack<8>(pack), mean_rstd, scales, biases));
}

// By one thread, which has them; call: has mean and rstd, null: not wanted.
template <class Call>
__device__ __forceinline__ void save_mean_rstd(const Call& call, int row, const float2& mean_rstd) {
  if (call.mean != nullptr) call.mean[row] = mean_rstd.x;
  if (call.rstd != nullptr) call.rstd[row] = mean_rstd.y;
}

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
