// quantize -- data = saturate(x * scale) in 8-bit floats, also transposed, and sums over rows; a block owns 128 x 128 elements
// owns:  each thread 64 elements of one group of pack_size columns; the block its 8-bit values in shared memory
// moves: x once in, data and the transposed copy once out: itemsize of x + 1 + 1 bytes an element; of sums over rows one a
//        column and block, which backward_parameters.cu adds up
// takes: any matrix; x may be a norm's y, made of its saved statistics; or 8-bit floats that are only to be transposed
// needs: num_cols and row strides multiples of pack_size, addresses aligned to a pack
#include "fp8.cuh"
#include "row.cuh"
#include "statistics.cuh"

// Members of a source: Held, Float8; Kept and keep(col), what a thread holds of its columns; Fetched and fetch(row, col), a
// pack and what belongs to its row; Factor and factor(), read once; convert(fetched, kept, factor, largest); and
// finish(largest).

// value * factor, rounded once, also of values below 2^-126, which the compiler flushes: only factors from 2^100 on make
// anything of them that is no zero in 8 bits.
__device__ __forceinline__ float times_large(float value, float factor) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x00800000u) return value * factor;
  const float product = static_cast<float>(magnitude) * 0x1p-100f * (factor * 0x1p-49f);
  return __uint_as_float(__float_as_uint(product) | (bits & 0x80000000u));
}
__device__ __forceinline__ double times_large(double value, double factor) { return value * factor; }

template <class T, int pack_size>
struct FetchedPack {
  Pack<T, pack_size> pack;
};

// x times one scale. scale, scale_inv, amax and rule as in QuantizeStore: scaling is given, or tensor, whose amax is known.
template <class X, class Y, Scaling scaling>
struct ScaledSource {
  using Float8 = Y;
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  using Factor = Compute;
  static constexpr int most_in_flight = 8;
  template <int pack_size>
  struct Kept {};
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
    return scale == nullptr ? 1.0f : *scale;
  }
  __device__ __forceinline__ Factor factor() const { return scale_of_all(); }
  template <int pack_size>
  __device__ __forceinline__ Fetched<pack_size> fetch(long long row, long long col) const {
    return {x.template load<pack_size>(row, col)};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Fetched<pack_size>& fetched, const Kept<pack_size>&,
                                                        Factor factor, Largest& largest) const {
    Compute values[pack_size];
    unpack(fetched.pack, values);
    return scaled<pack_size>(values, factor, largest);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> scaled(Compute (&values)[pack_size], Factor factor, Largest& largest) const {
    if constexpr (scaling == Scaling::given) largest.add_pack(values);
    if (factor < Compute(0x1p100)) {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] *= factor;
    } else {
#pragma unroll
      for (int at = 0; at < pack_size; ++at) values[at] = times_large(values[at], factor);
    }
    return repack_fp8<Y>(values);
  }
  __device__ __forceinline__ void finish(const Largest& largest) const {
    if (scaling == Scaling::given && amax != nullptr) raise_amax(amax, warp_reduce<32>(largest).bits());
    if (blockIdx.x == 0 && threadIdx.x == 0 && scale_inv != nullptr) *scale_inv = inverse_of_any(scale_of_all());
  }
};

// y of a norm whose statistics are known, times one scale.
template <class X, class Weight, class Bias, bool centered, bool zero_centered, class Rounded, class Y>
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
    return {source.template fetch<pack_size>(row, col).pack, centered ? mean[row] : Compute(0), rstd[row]};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Fetched<pack_size>& fetched, const Kept<pack_size>& kept,
                                                        Factor factor, Largest& largest) const {
    const RowStatistics<Compute> statistics{fetched.mean, fetched.rstd, fetched.mean, 0};
    Compute values[pack_size], normalized[pack_size], made[pack_size];
    unpack(fetched.pack, values);
    statistics.template normalize<centered>(values, normalized);
    Affine::affine(normalized, kept, made);
    return source.template scaled<pack_size>(made, factor, largest);
  }
  __device__ __forceinline__ void finish(const Largest& largest) const { source.finish(largest); }
};

// 8-bit floats as they are.
template <class Y>
struct BytesSource {
  using Float8 = Y;
  using Held = Y;
  struct Factor {};
  static constexpr int most_in_flight = 8;
  template <int pack_size>
  struct Kept {};
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
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Fetched<pack_size>& fetched, const Kept<pack_size>&, Factor,
                                                        Largest&) const {
    return fetched.pack;
  }
  __device__ __forceinline__ void finish(const Largest&) const {}
};

template <class Source>
struct Quantize {
  using Float8 = typename Source::Float8;

  Source source;
  Float8* data;  // null: not wanted
  long long data_stride;
  Float8* transposed;  // [num_cols, num_rows], contiguous; null: not wanted
  long long num_rows;
  long long num_cols;
  void* partial_sums;  // [rows of squares, num_cols] in the arithmetic's type, where sums are wanted
};

// Where byte `col` of row `row` waits: rows of 16 bytes in another order in each 16 rows, so that neither the rows that are
// written nor the columns that are read meet in a bank.
__device__ __forceinline__ int place_in_square(int row, int col) { return row * 128 + (col ^ (row / 16 % 8 * 16)); }

// The columns of four rows of four bytes, as rows.
__device__ __forceinline__ void transpose_bytes(const unsigned (&rows)[4], unsigned (&cols)[4]) {
  const unsigned low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const unsigned high01 = __byte_perm(rows[0], rows[1], 0x7362), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  cols[0] = __byte_perm(low01, low23, 0x5410);
  cols[1] = __byte_perm(low01, low23, 0x7632);
  cols[2] = __byte_perm(high01, high23, 0x5410);
  cols[3] = __byte_perm(high01, high23, 0x7632);
}

// sums_up: whether sums of x over rows are wanted.
template <class Source, bool sums_up, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) quantize(const Quantize<Source> problem) {
  using Float8 = typename Source::Float8;
  constexpr int side = 128, pack_size = tile.pack_size;
  constexpr int rows_of_pass = tile.rows_per_block, num_passes = side / rows_of_pass;
  constexpr int in_flight = num_passes < Source::most_in_flight ? num_passes : Source::most_in_flight;
  static_assert(tile.threads_per_row * pack_size == side && tile.block_size() == 256,
                "threads share out the columns of a square");
  static_assert(num_passes % in_flight == 0, "no pass is behind the square's last row");
  unsigned char* square = dynamic_smem();
  const long long squares_across = (problem.num_cols + side - 1) / side;
  // The last ones first: what wrote or read the matrix before has left those in the L2 cache, if any.
  const long long turn = gridDim.x - 1 - blockIdx.x;
  const long long first_row = turn / squares_across * side, first_col = turn % squares_across * side;

  const int own_row = threadIdx.x / tile.threads_per_row, own_col = threadIdx.x % tile.threads_per_row * pack_size;
  const long long col = first_col + own_col;
  const bool in_row = col < problem.num_cols;
  const auto kept = problem.source.template keep<pack_size>(in_row ? col : 0);
  const auto factor = problem.source.factor();
  Largest largest{};
  using Compute = typename ComputeOf<typename Source::Held>::type;
  [[maybe_unused]] Compute sums[pack_size] = {};
#pragma unroll 1
  for (int first = 0; first < num_passes; first += in_flight) {
    typename Source::template Fetched<pack_size> fetched[in_flight];
#pragma unroll
    for (int at = 0; at < in_flight; ++at) {
      const long long row = first_row + own_row + (first + at) * rows_of_pass;
      fetched[at] = {};
      if (in_row && row < problem.num_rows) fetched[at] = problem.source.template fetch<pack_size>(row, col);
    }
#pragma unroll
    for (int at = 0; at < in_flight; ++at) {
      const int row_of_square = own_row + (first + at) * rows_of_pass;
      const long long row = first_row + row_of_square;
      Pack<Float8, pack_size> made{};
      if (in_row && row < problem.num_rows) {
        made = problem.source.template convert<pack_size>(fetched[at], kept, factor, largest);
        if (problem.data != nullptr) store_pack<pack_size>(problem.data + row * problem.data_stride + col, made);
      }
      store_pack<pack_size>(reinterpret_cast<Float8*>(square + place_in_square(row_of_square, own_col)), made);
      if constexpr (sums_up) {
        Compute values[pack_size];
        unpack(fetched[at].pack, values);
#pragma unroll
        for (int each = 0; each < pack_size; ++each) sums[each] += values[each];
      }
    }
  }
  problem.source.finish(largest);
  if constexpr (sums_up) {
    Compute* total = static_cast<Compute*>(problem.partial_sums) + first_row / side * problem.num_cols + first_col;
    add_groups<side, rows_of_pass>(reinterpret_cast<Compute*>(square + side * side), sums, own_row, own_col, total,
                                   problem.num_cols - first_col);
  }
  if (problem.transposed == nullptr) return;
  __syncthreads();

  // A lane takes 16 rows of 4 columns: 8 lanes write 128 bytes of a column.
  const int lane = threadIdx.x % 32, group = lane / 4, four = threadIdx.x / 32 * 4 + lane % 4;
  unsigned cols[4][4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    unsigned rows[4], turned[4];
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      rows[at] = *reinterpret_cast<const unsigned*>(square + place_in_square(group * 16 + part * 4 + at, four * 4));
    }
    transpose_bytes(rows, turned);
#pragma unroll
    for (int at = 0; at < 4; ++at) cols[at][part] = turned[at];
  }
  const long long row = first_row + group * 16;
  // As many bytes at once as a column's address, a multiple of num_rows, allows.
#pragma unroll
  for (int at = 0; at < 4; ++at) {
    const long long own = first_col + four * 4 + at;
    if (own >= problem.num_cols) continue;
    unsigned char* column = reinterpret_cast<unsigned char*>(problem.transposed) + own * problem.num_rows + row;
    const int left = static_cast<int>(min(problem.num_rows - row, 16ll));
    if (problem.num_rows % 16 == 0) {
      if (left > 0) *reinterpret_cast<uint4*>(column) = make_uint4(cols[at][0], cols[at][1], cols[at][2], cols[at][3]);
    } else if (problem.num_rows % 4 == 0) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        if (4 * word < left) reinterpret_cast<unsigned*>(column)[word] = cols[at][word];
      }
    } else if (problem.num_rows % 2 == 0) {
#pragma unroll
      for (int half = 0; half < 8; ++half) {
        if (2 * half < left) {
          reinterpret_cast<unsigned short*>(column)[half] = static_cast<unsigned short>(cols[at][half / 2] >> half % 2 * 16);
        }
      }
    } else {
#pragma unroll
      for (int byte = 0; byte < 16; ++byte) {
        if (byte < left) column[byte] = static_cast<unsigned char>(cols[at][byte / 4] >> byte % 4 * 8);
      }
    }
  }
}
