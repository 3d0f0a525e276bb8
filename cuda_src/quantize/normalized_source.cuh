// normalized_source.cuh -- a source of quantize.cu: a norm whose statistics are known
#pragma once
#include "mean_rstd.cuh"
#include "quantize_sources.cuh"

// The y of a norm whose statistics are known, times one scale.
template <class X, class Weight, class Bias, bool centered, bool zero_centered, class Rounded,
          class Y>
struct NormalizedSource {
  using Float8 = Y;
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  using Affine = Store<Y, Weight, Bias, zero_centered, Rounded>;
  using Factor = Compute;
  static constexpr int most_in_flight = 4;
  template <int pack_size>
  using Kept = typename Affine::template Kept<pack_size>;
  template <int pack_size>
  struct Fetched {
    Pack<X, pack_size> pack;
    Compute mean, rstd;
  };

  ScaledSource<X, Y, Scaling::given> source;
  const Weight* weight;
  const Bias* bias;
  const Compute* mean;  // null in RMSNorm
  const Compute* rstd;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {{weight, col}, {bias, col}};
  }
  __device__ __forceinline__ Factor factor() const { return source.factor(); }
  template <int pack_size>
  __device__ __forceinline__ Fetched<pack_size> fetch(long long row, long long col) const {
    return {source.template fetch<pack_size>(row, col).pack, centered ? mean[row] : Compute(0),
            rstd[row]};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Fetched<pack_size>& fetched,
                                                        const Kept<pack_size>& kept, Factor factor,
                                                        Largest& largest) const {
    const RowStatistics<Compute> statistics{fetched.mean, fetched.rstd, fetched.mean, 0};
    Compute values[pack_size], normalized[pack_size], y_values[pack_size];
    unpack(fetched.pack, values);
    statistics.template normalize<centered>(values, normalized);
    Affine::affine(normalized, kept, y_values);
    return source.template scaled<pack_size>(y_values, factor, largest);
  }
  __device__ __forceinline__ void finish(const Largest& largest) const { source.finish(largest); }
};
