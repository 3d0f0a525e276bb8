// load.cuh -- the functors through which a kernel reads a row: by value
// Held, Compute      the element type that holds a loaded value exactly; that of the arithmetic
// load(row, col)     -> Pack<Held, pack_size>; may have a side effect (has_effect), such as writing
//                    a sum. It is then begin(row, col) -> Begun, which only reads, so that the
//                    loads of all packs start before the first store, and finish(row, col, begun,
//                    present)
// reload(row, col)   the same in a later pass, without a side effect; needed only with one
// If the copy engine can fetch a row, num_streams tensors of Held make it up: row_start(row,
// stream), stride(stream), combine(packs). keep(row, col, values, present) is the effect of load.
// A user's own struct may take their place. Another: sum_load.cuh.
#pragma once
#include "convert.cuh"

// x as it is.
template <class X>
struct Load {
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  static constexpr int num_streams = 1;
  static constexpr bool has_effect = false;

  const X* x;
  long long x_stride;

  __device__ __forceinline__ long long stride(int) const { return x_stride; }
  __device__ __forceinline__ const X* row_start(long long row, int = 0) const {
    return x + row * x_stride;
  }

  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> load(long long row, long long col) const {
    return load_pack<pack_size>(row_start(row) + col);
  }

  template <int pack_size>
  __device__ __forceinline__ static Pack<X, pack_size> combine(
      const Pack<X, pack_size> (&packs)[1]) {
    return packs[0];
  }
  template <int pack_size>
  __device__ __forceinline__ void keep(long long, long long, const Compute (&)[pack_size],
                                       bool) const {}
};

// x of any column of a row, as it is in memory; for functors.
template <class X, class C>
struct OtherX {
  const X* row_start;

  __device__ __forceinline__ C operator()(long long col) const {
    return load_element<C>(row_start + col);
  }
};

// A pack in a later pass.
template <int pack_size, class Load>
__device__ __forceinline__ Pack<typename Load::Held, pack_size> reload(const Load& load,
                                                                       long long row,
                                                                       long long col) {
  if constexpr (Load::has_effect) {
    return load.template reload<pack_size>(row, col);
  } else {
    return load.template load<pack_size>(row, col);
  }
}
// One element in any pass, without a side effect. A load whose reload reads what an earlier pass
// has written has form(row, col) for that.
template <class Load>
__device__ __forceinline__ typename Load::Compute load_one(const Load& load, long long row,
                                                           long long col) {
  typename Load::Compute value[1];
  if constexpr (requires { load.template form<1>(row, col); }) {
    unpack(load.template form<1>(row, col), value);
  } else {
    unpack(reload<1>(load, row, col), value);
  }
  return value[0];
}
