// bytes_source.cuh -- a source of quantize.cu: a matrix that has 8 bits already
#pragma once
#include "quantize_sources.cuh"

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
