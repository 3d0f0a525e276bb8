// quantize -- data = saturate(x * scale) in 8-bit floats, as a matrix and transposed; a block owns 128 rows of 128 columns
// owns:  each thread 64 elements of one group of pack_size columns; the block its 8-bit values in shared memory
// moves: x once in, data and the transposed copy once out: itemsize of x + 1 + 1 bytes an element
// takes: any matrix; x may be a norm's y, made of its saved statistics; or 8-bit floats that are only to be transposed
// needs: num_cols and row strides multiples of pack_size, addresses aligned to a pack
#include "fp8.cuh"
#include "row.cuh"
#include "statistics.cuh"

// Members of a source: Held, Float8, keep(col), fetch(row, col), convert(packs, row, kept, largest), and finish(largest).

// value * factor, rounded once, also of values below 2^-126, which the compiler flushes: only factors from 2^100 on make
// anything of them that is no zero in 8 bits.
__device__ __forceinline__ float times_large(float value, float factor) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x00800000u) return value * factor;
  const float product = static_cast<float>(magnitude) * 0x1p-100f * (factor * 0x1p-49f);
  return __uint_as_float(__float_as_uint(product) | (bits & 0x80000000u));
}
__device__ __forceinline__ double times_large(double value, double factor) { return value * factor; }

// x times one scale. x, scale, scale_inv and amax as in QuantizeStore with Scaling::given.
template <class X, class Y>
struct ScaledSource {
  using Float8 = Y;
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  template <int pack_size>
  struct Kept {};

  Load<X> x;
  const float* scale;
  float* scale_inv;
  unsigned* amax;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long) const {
    return {};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> fetch(long long row, long long col) const {
    return x.template load<pack_size>(row, col);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Pack<X, pack_size>& pack, long long, const Kept<pack_size>&,
                                                        Largest& largest) const {
    Compute values[pack_size];
    unpack(pack, values);
    return scaled<pack_size>(values, largest);
  }
  template <int pack_size, class Compute>
  __device__ __forceinline__ Pack<Y, pack_size> scaled(Compute (&values)[pack_size], Largest& largest) const {
    largest.add_pack(values);
    const Compute factor = scale == nullptr ? 1.0f : *scale;
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
    if (amax != nullptr) raise_amax(amax, warp_reduce<32>(largest).bits());
    if (blockIdx.x == 0 && threadIdx.x == 0 && scale_inv != nullptr)
      *scale_inv = inverse_of_any(scale == nullptr ? 1.0f : *scale);
  }
};

// y of a norm whose statistics are known, times one scale.
template <class X, class Weight, class Bias, bool centered, bool zero_centered, class Rounded, class Y>
struct NormalizedSource {
  using Float8 = Y;
  using Held = X;
  using Compute = typename ComputeOf<X>::type;
  using Affine = Store<Y, Weight, Bias, zero_centered, Rounded>;
  template <int pack_size>
  using Kept = typename Affine::template Kept<pack_size>;

  ScaledSource<X, Y> source;
  const Weight* weight;
  const Bias* bias;
  const Compute* mean;  // null in RMSNorm
  const Compute* rstd;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long col) const {
    return {{weight, col}, {bias, col}};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<X, pack_size> fetch(long long row, long long col) const {
    return source.template fetch<pack_size>(row, col);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Pack<X, pack_size>& pack, long long row,
                                                        const Kept<pack_size>& kept, Largest& largest) const {
    const Compute own_mean = centered ? mean[row] : Compute(0);
    const RowStatistics<Compute> statistics{own_mean, rstd[row], own_mean, 0};
    Compute values[pack_size], normalized[pack_size], made[pack_size];
    unpack(pack, values);
    statistics.template normalize<centered>(values, normalized);
    Affine::affine(normalized, kept, made);
    return source.template scaled<pack_size>(made, largest);
  }
  __device__ __forceinline__ void finish(const Largest& largest) const { source.finish(largest); }
};

// 8-bit floats as they are.
template <class Y>
struct BytesSource {
  using Float8 = Y;
  using Held = Y;
  template <int pack_size>
  struct Kept {};

  const Y* data;
  long long stride;

  template <int pack_size>
  __device__ __forceinline__ Kept<pack_size> keep(long long) const {
    return {};
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> fetch(long long row, long long col) const {
    return load_pack<pack_size>(data + row * stride + col);
  }
  template <int pack_size>
  __device__ __forceinline__ Pack<Y, pack_size> convert(const Pack<Y, pack_size>& pack, long long, const Kept<pack_size>&,
                                                        Largest&) const {
    return pack;
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

template <class Source, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm) quantize(const Quantize<Source> problem) {
  using Float8 = typename Source::Float8;
  constexpr int side = 128, pack_size = tile.pack_size;
  constexpr int rows_of_pass = tile.rows_per_block, num_passes = side / rows_of_pass;
  constexpr int in_flight = num_passes < 8 ? num_passes : 8;  // packs that a thread has asked for at a time
  static_assert(tile.threads_per_row * pack_size == side && tile.block_size() == 256,
                "threads share out the columns of a square");
  unsigned char* square = dynamic_smem();
  const long long squares_across = (problem.num_cols + side - 1) / side;
  const long long first_row = blockIdx.x / squares_across * side, first_col = blockIdx.x % squares_across * side;

  const int own_row = threadIdx.x / tile.threads_per_row, own_col = threadIdx.x % tile.threads_per_row * pack_size;
  const long long col = first_col + own_col;
  const bool in_row = col < problem.num_cols;
  const auto kept = problem.source.template keep<pack_size>(in_row ? col : 0);
  Largest largest{};
#pragma unroll 1
  for (int first = 0; first < num_passes; first += in_flight) {
    Pack<typename Source::Held, pack_size> packs[in_flight];
#pragma unroll
    for (int at = 0; at < in_flight; ++at) {
      const long long row = first_row + own_row + (first + at) * rows_of_pass;
      packs[at] = {};
      if (in_row && row < problem.num_rows) packs[at] = problem.source.template fetch<pack_size>(row, col);
    }
#pragma unroll
    for (int at = 0; at < in_flight; ++at) {
      const int row_of_square = own_row + (first + at) * rows_of_pass;
      const long long row = first_row + row_of_square;
      Pack<Float8, pack_size> made{};
      if (in_row && row < problem.num_rows) {
        made = problem.source.template convert<pack_size>(packs[at], row, kept, largest);
        if (problem.data != nullptr) store_pack<pack_size>(problem.data + row * problem.data_stride + col, made);
      }
      store_pack<pack_size>(reinterpret_cast<Float8*>(square + place_in_square(row_of_square, own_col)), made);
    }
  }
  problem.source.finish(largest);
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
