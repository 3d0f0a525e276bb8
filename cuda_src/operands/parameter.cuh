// parameter.cuh -- weight and bias: how kernels read them and keep them for many rows
//
// KeptParameter   a pack of weights or biases, as in memory, that a thread keeps for many rows
// LoadParameter   the functor through which a backward kernel reads the weight, or the bias
//
// Members of LoadParameter:
//   present             false if there is no parameter
//   load(col, values)   the parameter in the compute type; `missing` if there is none
//   keep(col) -> Kept   a pack for use in many rows
//   stays_packed        whether to keep the compiler from unpacking it early
//
// `void` as the type of a parameter means that it is absent.
#pragma once
#include "convert.cuh"

// Unpacks parameters to the compute type. zero_centered: 1 + each, added in the wider of the two
// types because a weight may be near -1.
template <bool zero_centered, int pack_size, class Parameter, class Compute>
__device__ __forceinline__ void unpack_parameter(const Pack<Parameter, pack_size>& pack,
                                                 Compute (&values)[pack_size]) {
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

// missing: the value of a parameter that is absent.
template <class Parameter, bool zero_centered, int pack_size>
struct KeptParameter {
  Pack<Parameter, pack_size> pack;

  __device__ __forceinline__ KeptParameter() = default;
  __device__ __forceinline__ KeptParameter(const Parameter* parameter, long long col)
      : pack(load_pack<pack_size>(parameter + col)) {}
  __device__ __forceinline__ KeptParameter(const Parameter* parameter, long long col,
                                           long long other_col)
      : pack(join(load_pack<pack_size / 2>(parameter + col),
                  load_pack<pack_size / 2>(parameter + other_col))) {}

  template <class Compute>
  __device__ __forceinline__ void unpack_to(Compute (&values)[pack_size], float) const {
    unpack_parameter<zero_centered>(pack, values);
  }
  __device__ __forceinline__ void forget_unpacked() { ::forget_unpacked(pack); }
  // zero: a word that is 0, which the compiler does not know, computed from the row's statistics.
  // So float16 is unpacked after these. Before the first row it would take twice the registers.
  __device__ __forceinline__ void unpack_after(unsigned int zero) {
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
  __device__ __forceinline__ void unpack_after(unsigned int) {}
};

template <class Weight, bool zero_centered, int missing = 1>
struct LoadParameter {
  static constexpr bool present = !is_same<Weight, void>;
  // Left alone, the compiler unpacks float16 once for all rows and keeps it in twice the registers.
  static constexpr bool stays_packed = is_same<Weight, __half>;

  using Parameter = Weight;
  static constexpr bool is_zero_centered = zero_centered;

  const Weight* weight;

  template <int pack_size>
  using Kept = KeptParameter<Weight, zero_centered, pack_size>;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {weight, col};
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

// joined: packs that are kept as one, 1 or 2. Single elements of 16 bits would take a register
// each.
template <class Parameter, bool zero_centered, int pack_size, int num_packs, int joined>
struct KeptPacks {
  KeptParameter<Parameter, zero_centered, joined * pack_size>
      kept[(num_packs + joined - 1) / joined];

  // col_of(pack): where a pack begins, also for the one after the last.
  template <class ColOf>
  __device__ __forceinline__ void load(const Parameter* parameter, ColOf col_of) {
#pragma unroll
    for (int pack = 0; pack < num_packs; pack += joined) {
      if constexpr (joined == 2) {
        kept[pack / 2] = {parameter, col_of(pack), col_of(pack + 1)};
      } else {
        kept[pack] = {parameter, col_of(pack)};
      }
    }
  }
  // stays_packed: unpack it for each row, which takes fewer registers. zero: see KeptParameter.
  template <class Compute>
  __device__ __forceinline__ void unpack(int pack, Compute (&values)[pack_size], float missing,
                                         bool stays_packed = true, unsigned int zero = 0) {
    if (pack % joined == 0 && stays_packed) kept[pack / joined].forget_unpacked();
    auto own = kept[pack / joined];
    own.unpack_after(zero);
    Compute all[joined * pack_size];
    own.unpack_to(all, missing);
#pragma unroll
    for (int at = 0; at < pack_size; ++at) values[at] = all[pack % joined * pack_size + at];
  }
};
