// quantize_sources.cuh -- the sources of quantize.cu: what its matrix is read from
//
// Members of a source:
//   Held, Float8                       the types of what is read and of what is written
//   keep(col) -> Kept                  what a thread keeps of its columns
//   fetch(row, col) -> Fetched         a pack, and what belongs to its row
//   factor() -> Factor                 read once
//   convert(fetched, kept, factor, largest) -> Pack<Float8>; raises `largest`
//   finish(largest)                    called by all threads at the end
//   most_in_flight                     packs that a thread fetches before it converts the first
#pragma once
#include "load.cuh"
#include "quantize_store.cuh"
#include "statistics.cuh"

// value * factor, rounded once, also for a value below 2^-126, which the compiler would flush. Only
// a factor of at least 2^100 makes such a value more than zero in 8 bits.
__device__ __forceinline__ float times_large(float value, float factor) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x00800000u) return value * factor;
  const float product = static_cast<float>(magnitude) * 0x1p-100f * (factor * 0x1p-49f);
  return __uint_as_float(__float_as_uint(product) | (bits & 0x80000000u));
}
__device__ __forceinline__ double times_large(double value, double factor) {
  return value * factor;
}

template <class T, int pack_size>
struct FetchedPack {
  Pack<T, pack_size> pack;
};

// x times one scale. The members are those of QuantizeStore. scaling: given, or tensor, whose amax
// is known.
template <class X, class Y, Scaling scaling>
struct ScaledSource {
  using Float8 = Y;
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  using Factor = Compute;
  static constexpr int most_in_flight = 8;
  template <int pack_size>
  using Kept = Nothing;
  template <int pack_size>
  using Fetched = FetchedPack<X, pack_size>;

  Load<X> x;
  const float* scale;
  float* scale_inv;
  unsigned* amax;
  ScaleRule rule;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long) const {
    return {};
  }
  __device__ __forceinline__ float scale_of_all() const {
    if constexpr (scaling == Scaling::tensor) return rule.scale_of(*amax, FormatOf<Y>::largest);
    return rule.given_scale(scale);
  }
  __device__ __forceinline__ Factor factor() const { return scale_of_all(); }
  template <int pack_size>
  __device__ __forceinline__ Fetched<pack_size> fetch(long long row, long long col) const {
    return {x.template load<pack_size>(row, col)};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Fetched<pack_size>& fetched,
                                                        const Kept<pack_size>&, Factor factor,
                                                        Largest& largest) const {
    Compute values[pack_size];
    unpack(fetched.pack, values);
    return scaled<pack_size>(values, factor, largest);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> scaled(Compute (&values)[pack_size], Factor factor,
                                                       Largest& largest) const {
    if constexpr (scaling == Scaling::given) largest.add_pack(values);
    if (factor < Compute(0x1p100)) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] *= factor;
    } else {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] = times_large(values[at], factor);
    }
    return repack_8_bits<Y>(values);
  }
  __device__ __forceinline__ void finish(const Largest& largest) const {
    if (scaling == Scaling::given && amax != nullptr)
      raise_amax(amax, warp_reduce<32>(largest).bits());
    if (blockIdx.x == 0 && threadIdx.x == 0 && scale_inv != nullptr)
      *scale_inv = inverse_of_any(scale_of_all());
  }
};

// 8-bit floats, unchanged.
template <class Y>
struct BytesSource {
  using Float8 = Y;
  using Held = Y;
  using Factor = Nothing;
  static constexpr int most_in_flight = 8;
  template <int pack_size>
  using Kept = Nothing;
  template <int pack_size>
  using Fetched = FetchedPack<Y, pack_size>;

  const Y* data;
  long long stride;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long) const {
    return {};
  }
  __device__ __forceinline__ Factor factor() const { return {}; }
  template <int pack_size>
  __device__ __forceinline__ Fetched<pack_size> fetch(long long row, long long col) const {
    return {load_pack<pack_size>(data + row * stride + col)};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Fetched<pack_size>& fetched,
                                                        const Kept<pack_size>&, Factor,
                                                        Largest&) const {
    return fetched.pack;
  }
  __device__ __forceinline__ void finish(const Largest&) const {}
};

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
