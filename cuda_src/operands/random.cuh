// random.cuh -- random words of an element, for the lines of functors
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011: "Parallel random numbers: as easy as 1, 2, 3"),
// with the seed as its key. Word col % 4 of the counter (col / 4, row) is that of (row, col). So it
// does not depend on tile or strategy, and backward computes it again.
// cupynorm.reference.dropout_mask is the same in NumPy.
#pragma once

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

// Four columns share one counter, and the compiler computes it once for those of a pack.
__device__ __forceinline__ unsigned random_word(long long seed, long long row, long long col) {
  return philox(seed, static_cast<unsigned long long>(col) / 4, row)
      .pick(static_cast<int>(col) & 3);
}
