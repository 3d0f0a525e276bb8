// load_store.cuh -- the functors through which a kernel reads a row and writes its result
//
// A kernel knows only its row. dtype, affine, residual and zero-centred weight live here; a functor is a struct of
// 8-byte words, passed by value, and any struct with the same members can stand in for these.
//
// load     Held: the type that keeps a loaded value exactly;  load(row, col), reload(row, col) -> Pack<Held, pack_size>
//          (reload: of a kernel that reads a row again; has no side effect)
//          num_streams: tensors of Held that make up the row, for a copy engine to fetch: each has row_start(row, stream) and a
//          stride(stream); combine(packs, one a stream) -> the row's pack; keep(row, col, values, present): load's side effect
//          has_effect: whether load has one. It is then begin(row, col) -> Begun, which only loads, and finish(row, col, begun,
//          present) -> Pack: so all packs of a row can be on their way before the first is stored
//          normalized, of backward: whether what is loaded is x_hat, not x
// store    store(row, col, values): values are in the compute type; applies what belongs to the output, rounds once
//          keep(col) -> Kept, for store(row, col, values, kept, present) in many rows; nothing is written if not present
//          bring_near(num_cols), of forward, by one block: what keep(col) will load
//          written(), written_stride(): the tensor that is written, where rows come and go in bundles
//          of backward: adds: whether a tensor of Added is added, whose rows a copy engine may fetch: added_start(row),
//          added_stride(); store(row, col, values, fetched)
//          quantizes, of forward: whether it is one of fp8.cuh, which keep more from pack to pack
//          recomputes: whether y is written again beside dx: Biases: the functor of its bias, biases(); recompute(row, col,
//          x_hats, weights, biases, present)
// scale    present: false if there is no weight; load(col, values): the weight, or 1, in the compute type (of a bias: or 0)
//          keep(col) -> Kept, for use in many rows; stays_unpacked: whether the compiler is to be kept from unpacking it early
//
// Offsets are 64-bit everywhere. `void` for a parameter's type means that it is absent.
#pragma once
#include "cluster.cuh"
#include "dropout.cuh"
#include "pack.cuh"

// A pack of weights or biases in the compute type; 1 + each when zero_centered, which is added in the wider of the two types: a
// weight may be near -1.
template <bool zero_centered, int pack_size, class Parameter, class Compute>
__device__ __forceinline__ void unpack_parameter(const Pack<Parameter, pack_size>& pack, Compute (&values)[pack_size]) {
  if constexpr (zero_centered && is_same<Parameter, double> && !is_same<Compute, double>) {
    double wide[pack_size];
    unpack(pack, wide);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) values[at] = static_cast<Compute>(1 + wide[at]);
  } else {
    unpack(pack, values);
    if constexpr (zero_centered) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] += static_cast<Compute>(1);
    }
  }
}

// What a thread keeps of a pack of weights or biases: as they lie in memory. `missing` stands for those that are absent.
template <class Parameter, bool zero_centered, int pack_size>
struct KeptParameter {
  Pack<Parameter, pack_size> pack;

  __device__ __forceinline__ KeptParameter() = default;
  __device__ __forceinline__ KeptParameter(const Parameter* parameter, long long col)
      : pack(load_pack<pack_size>(parameter + col)) {}
  __device__ __forceinline__ KeptParameter(const Parameter* parameter, long long col, long long other_col)
      : pack(join(load_pack<pack_size / 2>(parameter + col), load_pack<pack_size / 2>(parameter + other_col))) {}

  template <class Compute>
  __device__ __forceinline__ void unpack_to(Compute (&values)[pack_size], float) const {
    unpack_parameter<zero_centered>(pack, values);
  }
  __device__ __forceinline__ void forget_unpacked() { ::forget_unpacked(pack); }
  // zero: of what the value is multiplied by, so that float16 is unpacked then and not ahead of all rows, in more registers.
  __device__ __forceinline__ void await(unsigned int zero) {
    if constexpr (is_same<Parameter, __half> && pack_size > 1) {
#pragma unroll
      for (unsigned int& word : pack.word) word ^= zero;
    }
  }
};
template <bool zero_centered, int pack_size>
struct KeptParameter<void, zero_centered, pack_size> {
  __device__ __forceinline__ KeptParameter() = default;
  __device__ __forceinline__ KeptParameter(const void*, long long, long long = 0) {}

  template <class Compute>
  __device__ __forceinline__ void unpack_to(Compute (&values)[pack_size], float missing) const {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) values[at] = static_cast<Compute>(missing);
  }
  __device__ __forceinline__ void forget_unpacked() {}
  __device__ __forceinline__ void await(unsigned int) {}
};

// missing: what stands for a parameter that is absent.
template <class Weight, bool zero_centered, int missing = 1>
struct Scale {
  static constexpr bool present = !is_same<Weight, void>;
  // Left alone the compiler unpacks float16 once for all rows, and keeps it in twice the registers.
  static constexpr bool stays_unpacked = is_same<Weight, __half>;

  const Weight* weight;

  template <int pack_size>
  using Kept = KeptParameter<Weight, zero_centered, pack_size>;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {weight, col};
  }
  template <int pack_size>
  __device__ __forceinline__ Kept<2 * pack_size> keep_two(long long col, long long other_col) const {
    return {weight, col, other_col};
  }
  template <class Kept, int pack_size, class Compute>
  __device__ __forceinline__ static void unpack(const Kept& kept, Compute (&values)[pack_size]) {
    kept.unpack_to(values, missing);
  }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void load(long long col, Compute (&values)[pack_size]) const {
    keep<pack_size>(col).unpack_to(values, missing);
  }
};

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
  __device__ __forceinline__ const X* row_start(long long row, int = 0) const { return x + row * x_stride; }

  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> load(long long row, long long col) const {
    return load_pack<pack_size>(row_start(row) + col);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> reload(long long row, long long col) const {
    return load<pack_size>(row, col);
  }

  template <int pack_size>
  __device__ __forceinline__ static Pack<X, pack_size> combine(const Pack<X, pack_size> (&packs)[1]) {
    return packs[0];
  }
  template <int pack_size>
  __device__ __forceinline__ void keep(long long, long long, const Compute (&)[pack_size], bool) const {}
};

// x + residual, rounded once to their dtype: that sum is what is normalised, so that a fused call with the same tile gives the
// same bits as normalising the sum it returns, and backward sees the very row that forward saw. `sum` may be null.
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
  X* sum;
  long long sum_stride;

  __device__ __forceinline__ long long stride(int stream) const { return stream == 0 ? x_stride : residual_stride; }
  __device__ __forceinline__ const X* row_start(long long row, int stream) const {
    return (stream == 0 ? x : residual) + row * stride(stream);
  }

  template <int pack_size>
  __device__ __forceinline__ Begun<pack_size> begin(long long row, long long col) const {
    return {{load_pack<pack_size>(row_start(row, 0) + col), load_pack<pack_size>(row_start(row, 1) + col)}};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> finish(long long row, long long col, const Begun<pack_size>& begun,
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
  __device__ __forceinline__ static Pack<X, pack_size> combine(const Pack<X, pack_size> (&packs)[2]) {
    Compute left[pack_size], right[pack_size];
    unpack(packs[0], left);
    unpack(packs[1], right);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) left[at] += right[at];
    return repack<X>(left);
  }
  // values: of a combined pack, so that rounding takes nothing from them.
  template <int pack_size>
  __device__ __forceinline__ void keep(long long row, long long col, const Compute (&values)[pack_size], bool present) const {
    if (sum != nullptr && present) store_pack<pack_size>(sum + row * sum_stride + col, repack<X>(values));
  }
};

// The wider type of arithmetic of two element types; void counts as none.
template <class A, class B>
struct WiderOf {
  using type = typename ComputeOf<A>::type;
};
template <class A>
struct WiderOf<A, double> {
  using type = double;
};

template <class A, class B>
struct Otherwise {
  using type = A;
};
template <class B>
struct Otherwise<void, B> {
  using type = B;
};

// residual + factor * x, rounded once to Sum: that sum is what is normalised. x, residual (void: there is none) and the sum
// each have their own type, which no copy engine fetches: hence no streams. Needs `sum`, from which the row is read again.
template <class X, class Residual, class Sum, class RowScale, bool drops>
struct SumLoad {
  using Held = Sum;
  using Compute = typename ComputeOf<Sum>::type;
  using Wide = typename WiderOf<typename WiderOf<X, Residual>::type, Sum>::type;
  static constexpr bool has_effect = true;

  template <int pack_size>
  struct Begun {
    Pack<X, pack_size> x;
    Pack<typename Otherwise<Residual, X>::type, pack_size> residual;
  };

  const X* x;
  long long x_stride;
  const Residual* residual;
  long long residual_stride;
  Sum* sum;
  long long sum_stride;
  Factor<RowScale, drops> factor;

  template <int pack_size>
  __device__ __forceinline__ Begun<pack_size> begin(long long row, long long col) const {
    Begun<pack_size> begun;
    begun.x = load_pack<pack_size>(x + row * x_stride + col);
    if constexpr (!is_same<Residual, void>) begun.residual = load_pack<pack_size>(residual + row * residual_stride + col);
    return begun;
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> finish(long long row, long long col, const Begun<pack_size>& begun,
                                                         bool present = true) const {
    Wide values[pack_size];
    unpack(begun.x, values);
    factor.multiply(row, col, values, present);
    if constexpr (!is_same<Residual, void>) {
      Wide added[pack_size];
      unpack(begun.residual, added);
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] += added[at];
    }
    const Pack<Sum, pack_size> rounded = repack<Sum>(values);
    if (present) store_pack<pack_size>(sum + row * sum_stride + col, rounded);
    return rounded;
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> load(long long row, long long col) const {
    return finish(row, col, begin<pack_size>(row, col));
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Sum, pack_size> reload(long long row, long long col) const {
    return load_pack<pack_size>(sum + row * sum_stride + col);
  }
};

// Base of the stores of backward. Scale<void, ..>: no bias, and nothing to load.
struct WritesDxAlone {
  static constexpr bool recomputes = false;
  using Biases = Scale<void, false, 0>;
};

// Rounded: an element type that x_hat is rounded to before the weight multiplies it, as some models are written; void: it is
// not.
template <class Y, class Weight, class Bias, bool zero_centered, class Rounded = void>
struct Store : WritesDxAlone {
  using Added = Y;
  static constexpr bool adds = false;
  static constexpr bool quantizes = false;

  Y* y;
  long long y_stride;
  const Weight* weight;
  const Bias* bias;

  __device__ __forceinline__ Y*& written() { return y; }
  __device__ __forceinline__ long long& written_stride() { return y_stride; }

  template <int pack_size>
  struct Kept {
    KeptParameter<Weight, zero_centered, pack_size> weight;
    KeptParameter<Bias, false, pack_size> bias;

    __device__ __forceinline__ void forget_unpacked() {
      weight.forget_unpacked();
      bias.forget_unpacked();
    }
    __device__ __forceinline__ void await(unsigned int zero) {
      weight.await(zero);
      bias.await(zero);
    }
  };
  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {{weight, col}, {bias, col}};
  }
  __device__ __forceinline__ void bring_near(long long num_cols) const {
    prefetch(weight, num_cols);
    prefetch(bias, num_cols);
  }
  // Of two packs that lie apart: lone elements of 16 bits would take a register each.
  template <int pack_size>
  __device__ __forceinline__ Kept<2 * pack_size> keep_two(long long col, long long other_col) const {
    return {{weight, col, other_col}, {bias, col, other_col}};
  }

  // y before it is rounded.
  template <int pack_size, class Compute>
  __device__ __forceinline__ static void affine(const Compute (&values)[pack_size], const Kept<pack_size>& kept,
                                                Compute (&made)[pack_size]) {
    Compute weights[pack_size], biases[pack_size];
    kept.weight.unpack_to(weights, 1.0f);
    kept.bias.unpack_to(biases, 0.0f);
    affine(values, weights, biases, made);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ static void affine(const Compute (&values)[pack_size], const Compute (&weights)[pack_size],
                                                const Compute (&biases)[pack_size], Compute (&made)[pack_size]) {
#pragma unroll
    for (int at = 0; at < pack_size; ++at) made[at] = values[at];
    if constexpr (!is_same<Rounded, void>) unpack(repack<Rounded>(values), made);
    if constexpr (!is_same<Weight, void> || !is_same<Bias, void>) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) made[at] = made[at] * weights[at] + biases[at];
    }
  }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Kept<pack_size>& kept, bool present = true) const {
    Compute weights[pack_size], biases[pack_size];
    kept.weight.unpack_to(weights, 1.0f);
    kept.bias.unpack_to(biases, 0.0f);
    store(row, col, values, weights, biases, present);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Compute (&weights)[pack_size], const Compute (&biases)[pack_size],
                                        bool present) const {
    Compute made[pack_size];
    affine(values, weights, biases, made);
    const Pack<Y, pack_size> rounded = repack<Y>(made);
    if (present) store_pack<pack_size>(y + row * y_stride + col, rounded);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        bool present = true) const {
    store(row, col, values, keep<pack_size>(present ? col : 0), present);
  }
};

// Nothing: of a forward that gives mean and rstd alone. Its words are those of every Store.
template <bool zero_centered>
struct Store<void, void, void, zero_centered, void> {
  static constexpr bool quantizes = false;

  void* y;
  long long y_stride;
  const void* weight;
  const void* bias;

  template <int pack_size>
  struct Kept {
    __device__ __forceinline__ void forget_unpacked() {}
  };
  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long) const {
    return {};
  }
  __device__ __forceinline__ void bring_near(long long) const {}
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long, long long, const Compute (&)[pack_size], const Kept<pack_size>&,
                                        bool = true) const {}
};

// One x_hat, two affine maps of it: y of First, y1 of Second.
template <class First, class Second>
struct TwoStores {
  static constexpr bool quantizes = false;

  First first;
  Second second;

  template <int pack_size>
  struct Kept {
    typename First::template Kept<pack_size> first;
    typename Second::template Kept<pack_size> second;

    __device__ __forceinline__ void forget_unpacked() {
      first.forget_unpacked();
      second.forget_unpacked();
    }
  };
  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {first.template keep<pack_size>(col), second.template keep<pack_size>(col)};
  }
  __device__ __forceinline__ void bring_near(long long num_cols) const {
    first.bring_near(num_cols);
    second.bring_near(num_cols);
  }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Kept<pack_size>& kept, bool present = true) const {
    first.store(row, col, values, kept.first, present);
    second.store(row, col, values, kept.second, present);
  }
};

// x_hat of a row from the y that forward wrote, for a backward that has kept y alone: (y - bias) / weight. A weight smaller
// than `smallest` divides as if it were that, with its sign: y has then lost more of x_hat than its digits hold.
template <class Y, class Weight, class Bias, bool zero_centered, class C>
struct LoadXHat {
  using Held = C;
  using Compute = C;
  static constexpr bool has_effect = false;
  static constexpr bool normalized = true;

  const Y* y;
  long long y_stride;
  const Weight* weight;
  const Bias* bias;
  double smallest;

  template <int pack_size>
  __device__ __forceinline__ Pack<C, pack_size> load(long long row, long long col) const {
    C values[pack_size], weights[pack_size], biases[pack_size];
    unpack(load_pack<pack_size>(y + row * y_stride + col), values);
    KeptParameter<Weight, zero_centered, pack_size>(weight, col).unpack_to(weights, 1.0f);
    KeptParameter<Bias, false, pack_size>(bias, col).unpack_to(biases, 0.0f);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) {
      const C least = static_cast<C>(smallest);
      const C divisor = weights[at] >= least || weights[at] <= -least ? weights[at] : weights[at] < 0 ? -least : least;
      values[at] = (values[at] - biases[at]) / divisor;
    }
    return repack<C>(values);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<C, pack_size> reload(long long row, long long col) const {
    return load<pack_size>(row, col);
  }
};

// dx plus the gradient that reaches the sum x + residual from elsewhere, added before the one rounding.
template <class Dx, class Dsum>
struct AddStore : WritesDxAlone {
  using Added = Dsum;
  static constexpr bool adds = true;

  Dx* dx;
  long long dx_stride;
  const Dsum* dsum;
  long long dsum_stride;

  __device__ __forceinline__ Dx*& written() { return dx; }
  __device__ __forceinline__ long long& written_stride() { return dx_stride; }
  __device__ __forceinline__ const Dsum* added_start(long long row) const { return dsum + row * dsum_stride; }
  __device__ __forceinline__ long long added_stride() const { return dsum_stride; }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Pack<Dsum, pack_size>& fetched, bool present = true) const {
    Compute added[pack_size];
    unpack(fetched, added);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) added[at] += values[at];
    const Pack<Dx, pack_size> rounded = repack<Dx>(added);
    if (present) store_pack<pack_size>(dx + row * dx_stride + col, rounded);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        bool present = true) const {
    Pack<Dsum, pack_size> fetched{};
    if (present) fetched = load_pack<pack_size>(added_start(row) + col);
    store(row, col, values, fetched, present);
  }
};

// The gradient of a sum, to which comes what reaches the sum from elsewhere (void: nothing does): to the residual as it is
// (void: not wanted), to x times the factor of forward. Each is rounded once.
template <class Dx, class Dresidual, class Dsum, class RowScale, bool drops>
struct SplitStore : WritesDxAlone {
  static constexpr bool adds = !is_same<Dsum, void>;
  using Added = typename Otherwise<Dsum, Dx>::type;

  Dx* dx;
  long long dx_stride;
  const Dsum* dsum;
  long long dsum_stride;
  Dresidual* dresidual;
  long long dresidual_stride;
  Factor<RowScale, drops> factor;

  __device__ __forceinline__ const Added* added_start(long long row) const { return dsum + row * dsum_stride; }
  __device__ __forceinline__ long long added_stride() const { return dsum_stride; }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        const Pack<Added, pack_size>& fetched, bool present = true) const {
    Compute split[pack_size];
    if constexpr (adds) unpack(fetched, split);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) split[at] = adds ? split[at] + values[at] : values[at];
    if constexpr (!is_same<Dresidual, void>) {
      const Pack<Dresidual, pack_size> rounded = repack<Dresidual>(split);
      if (present) store_pack<pack_size>(dresidual + row * dresidual_stride + col, rounded);
    }
    factor.multiply(row, col, split, present);
    const Pack<Dx, pack_size> rounded = repack<Dx>(split);
    if (present) store_pack<pack_size>(dx + row * dx_stride + col, rounded);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ void store(long long row, long long col, const Compute (&values)[pack_size],
                                        bool present = true) const {
    Pack<Added, pack_size> fetched{};
    if constexpr (adds) {
      if (present) fetched = load_pack<pack_size>(added_start(row) + col);
    }
    store(row, col, values, fetched, present);
  }
};

// What StoreDx writes, and beside it y: by forward's own store, from the x_hat of backward, so that what needs the normalised
// tensor in backward need not keep it, nor read x once more. The kernel holds the weight for dx anyway.
template <class StoreDx, class Y, class Weight, class Bias, bool zero_centered>
struct RecomputingStore : StoreDx {
  static constexpr bool recomputes = true;
  using Biases = Scale<Bias, false, 0>;

  Store<Y, Weight, Bias, zero_centered> store_y;

  __device__ __forceinline__ Biases biases() const { return {store_y.bias}; }

  template <int pack_size, class Compute>
  __device__ __forceinline__ void recompute(long long row, long long col, const Compute (&x_hats)[pack_size],
                                            const Compute (&weights)[pack_size], const Compute (&biases)[pack_size],
                                            bool present = true) const {
    store_y.store(row, col, x_hats, weights, biases, present);
  }
};
