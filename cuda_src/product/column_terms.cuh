// column_terms.cuh -- what the columns of norm_linear.cu's y add, as 16 more columns of a product
//
// y / rstd = product - mean sum + bias / rstd, with mean, rstd of a row and sum, bias of a column.
// Three bfloat16 hold the 24 bits of a factor: r0 + r1 + r2 of a row, c0 + c1 + c2 of a column.
// Each of the two terms is 8 columns of the product:
//   r0 c0 + r0 c1 + r1 c0 + r1 c1 + r0 c2 + r2 c0, and two zeros
// The other three pairs of parts are below the last bit.
#pragma once
#include "convert.cuh"

constexpr int num_term_cols = 16;

// The three bfloat16 that add up to a value.
struct Parts {
  unsigned part[3];

  __device__ __forceinline__ explicit Parts(float value) {
#pragma unroll
    for (int at = 0; at < 3; ++at) {
      const float rounded[1] = {value};
      const Pack<__nv_bfloat16, 1> pack = repack<__nv_bfloat16>(rounded);
      part[at] = pack.word[0];
      value -= __uint_as_float(part[at] << 16);
    }
  }
};

// Of a column: 4 pairs of columns, of which each word is one.
__device__ __forceinline__ void column_words(float value, unsigned (&words)[4]) {
  const Parts of(value);
  words[0] = words[1] = of.part[0] | of.part[1] << 16;
  words[2] = of.part[2] | of.part[0] << 16;
  words[3] = 0;
}
// Of a row: the word that column_words' word `pair` is multiplied by.
__device__ __forceinline__ unsigned row_word(float value, unsigned pair) {
  const Parts of(value);
  const unsigned twice = pair == 0 ? of.part[0] : of.part[1];
  const unsigned last = pair == 2 ? of.part[0] | of.part[2] << 16 : 0;
  return pair < 2 ? twice | twice << 16 : last;
}
