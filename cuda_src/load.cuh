// load.cuh -- the functors through which a kernel reads a row
//
// A functor is a struct of 8-byte words, passed by value. A user's own struct may take its place.
// Offsets are 64-bit. Members of every load:
//   Held, Compute       the element type that holds a loaded value exactly; the type of the
//                       arithmetic
//   load(row, col)      -> Pack<Held, pack_size>; may have a side effect, such as writing a sum
//   reload(row, col)    the same in a later pass, without a side effect
//   has_effect          whether load has a side effect. If so, load is begin, then finish:
//                       begin(row, col) -> Begun only reads, so that a kernel can start the loads
//                       of all packs before the first store; finish(row, col, begun, present) ->
//                       Pack
//   normalized          of backward: whether the loaded row is x_hat, not x
// Members of a load whose row the copy engine can fetch:
//   num_streams         tensors of Held that make up a row: row_start(row, stream), stride(stream)
//   combine(packs)      the row's pack, from one pack of each stream
//   keep                keep(row, col, values, present): the side effect of load
//
// load_one(load, row, col) reads one element in any pass, without a side effect. A load whose
// reload reads what an earlier pass has written has form(row, col) for that.
//
// Other loads: sum_load.cuh, x_hat_load.cuh.
#pragma once
#include "pack.cuh"

// x as it is.
template <class X>
struct Load {
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  static constexpr int num_streams = 1;
  static constexpr bool has_effect = false;
  static constexpr bool normalized = false;

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
  __device__ __forceinline__ Pack<X, pack_size> reload(long long row, long long col) const {
    return load<pack_size>(row, col);
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

// x + residual, rounded once to their dtype. The rounded sum is normalised: a fused call gives the
// same bits as normalising the sum that it returns, and backward reads the row that forward used.
template <class X>
struct ResidualLoad {
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  static constexpr int num_streams = 2;
  static constexpr bool has_effect = true;

  template <int pack_size>
  struct Begun {
    Pack<X, pack_size> packs[2];
  };

  const X* x;
  long long x_stride;
  const X* residual;
  long long residual_stride;
  X* sum;  // null: not wanted
  long long sum_stride;

  __device__ __forceinline__ long long stride(int stream) const {
    return stream == 0 ? x_stride : residual_stride;
  }
  __device__ __forceinline__ const X* row_start(long long row, int stream) const {
    return (stream == 0 ? x : residual) + row * stride(stream);
  }

  template <int pack_size>
  __device__ __forceinline__ Begun<pack_size> begin(long long row, long long col) const {
    return {{load_pack<pack_size>(row_start(row, 0) + col),
             load_pack<pack_size>(row_start(row, 1) + col)}};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> finish(long long row, long long col,
                                                       const Begun<pack_size>& begun,
                                                       bool present = true) const {
    const Pack<X, pack_size> added = combine(begun.packs);
    if (sum != nullptr && present) store_pack<pack_size>(sum + row * sum_stride + col, added);
    return added;
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> load(long long row, long long col) const {
    return finish(row, col, begin<pack_size>(row, col));
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> reload(long long row, long long col) const {
    return combine(begin<pack_size>(row, col).packs);
  }

  template <int pack_size>
  __device__ __forceinline__ static Pack<X, pack_size> combine(
      const Pack<X, pack_size> (&packs)[2]) {
    Compute left[pack_size], right[pack_size];
    unpack(packs[0], left);
    unpack(packs[1], right);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) left[at] += right[at];
    return repack<X>(left);
  }
  // values: those of a combined pack, so that rounding does not change them.
  template <int pack_size>
  __device__ __forceinline__ void keep(long long row, long long col,
                                       const Compute (&values)[pack_size], bool present) const {
    if (sum != nullptr && present)
      store_pack<pack_size>(sum + row * sum_stride + col, repack<X>(values));
  }
};

template <class Load>
__device__ __forceinline__ typename Load::Compute load_one(const Load& load, long long row,
                                                           long long col) {
  typename Load::Compute value[1];
  if constexpr (requires { load.template form<1>(row, col); }) {
    unpack(load.template form<1>(row, col), value);
  } else {
    unpack(load.template reload<1>(row, col), value);
  }
  return value[0];
}
