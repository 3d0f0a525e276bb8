// dropout.cuh -- what x is multiplied by before a residual is added: row_scale[row], and dropout
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011: "Parallel random numbers: as easy as 1, 2, 3"),
// with the seed as its key. Word col % 4 of the counter (col / 4, row) decides element (row, col).
// So the mask does not depend on tile or strategy, and backward computes it again.
// cupynorm.reference.dropout_mask is the same in NumPy.
#pragma once
#include "convert.cuh"

struct Random4 {
  unsigned word[4];

  // word[at], by selects: an index would put the words in local memory.
  __device__ __forceinline__ unsigned pick(int at) const {
    const unsigned even = at & 2 ? word[2] : word[0], odd = at & 2 ? word[3] : word[1];
    return at & 1 ? odd : even;
  }
};

__device__ __forceinline__ Random4 philox(unsigned long long key, unsigned long long low,
                                          unsigned long long high) {
  unsigned counter[4] = {static_cast<unsigned>(low), static_cast<unsigned>(low >> 32),
                         static_cast<unsigned>(high), static_cast<unsigned>(high >> 32)};
  unsigned first_key = static_cast<unsigned>(key), second_key = static_cast<unsigned>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xD2511F53ull * counter[0],
                             second = 0xCD9E8D57ull * counter[2];
    counter[0] = static_cast<unsigned>(second >> 32) ^ counter[1] ^ first_key;
    counter[1] = static_cast<unsigned>(second);
    counter[2] = static_cast<unsigned>(first >> 32) ^ counter[3] ^ second_key;
    counter[3] = static_cast<unsigned>(first);
    first_key += 0x9E3779B9u;
    second_key += 0xBB67AE85u;
  }
  return {{counter[0], counter[1], counter[2], counter[3]}};
}

// RowScale: the element type of row_scale, void if there is none. drops: whether there is dropout.
template <class RowScale, bool drops>
struct Factor {
  static constexpr bool present = drops || !is_same<RowScale, void>;

  const RowScale* row_scale;  // [num_rows]
  const long long* seed_at;   // the seed in device memory; null: `seed` is the seed
  long long seed;
  long long drop_below;  // 2^32 * probability: an element with a smaller random word is dropped
  double keep_scale;     // the factor of the other elements

  // values: a pack of row `row` from column `col`. Reads nothing from row_scale if not present.
  template <int pack_size, class Compute>
  __device__ __forceinline__ void multiply(long long row, long long col,
                                           Compute (&values)[pack_size], bool is_present) const {
    if constexpr (!is_same<RowScale, void>) {
      const auto scale = load_element<Compute>(row_scale + (is_present ? row : 0));
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] *= scale;
    }
    if constexpr (drops) {
      const auto key = static_cast<unsigned long long>(seed_at != nullptr ? *seed_at : seed);
      const auto kept = static_cast<Compute>(keep_scale);
#pragma unroll
      for (int first = 0; first < pack_size; first += 4) {
        const Random4 random = philox(key, static_cast<unsigned long long>(col + first) / 4, row);
#pragma unroll
        for (int at = first; at < first + 4 && at < pack_size; ++at) {
          const unsigned word =
              random.pick(pack_size < 4 ? static_cast<int>(col + at) % 4 : at % 4);
          values[at] = static_cast<long long>(word) < drop_below ? Compute(0) : values[at] * kept;
        }
      }
    }
  }
};
