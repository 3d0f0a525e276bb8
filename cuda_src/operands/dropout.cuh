// dropout.cuh -- what x is multiplied by before a residual is added: row_scale[row], and dropout
#pragma once
#include "convert.cuh"
#include "random.cuh"

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
