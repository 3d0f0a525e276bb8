// quantize -- data = saturate(x * scale), also transposed; a block owns 128 x 128 elements
// owns:  each thread 64 elements of one group of pack_size columns; the block its 8-bit values in
//        shared memory
// moves: x once in, data and the transposed copy once out: itemsize of x + 1 + 1 bytes an element.
//        For sums over rows, one sum a column and block, which backward_parameters.cu adds up
// takes: any matrix. x may stand for a norm's y, computed from its saved statistics; or x has 8
//        bits and is only transposed
// needs: num_cols and row strides multiples of pack_size, addresses aligned to a pack
#include "quantize_sources.cuh"
#include "reduce.cuh"
#include "tile.cuh"

constexpr int square_side = 128;

// Where the byte of a row and column is in the square. Units of 16 bytes are permuted differently
// in each 16 rows, so that neither writing rows nor reading columns causes bank conflicts.
__device__ __forceinline__ int place_in_square(int row, int col) {
  return row * square_side + (col ^ (row / 16 % 8 * 16));
}

// Transposes 4 x 4 bytes.
__device__ __forceinline__ void transpose_bytes(const unsigned (&rows)[4], unsigned (&cols)[4]) {
  const unsigned low01 = __byte_perm(rows[0], rows[1], 0x5140);
  const unsigned low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const unsigned high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const unsigned high23 = __byte_perm(rows[2], rows[3], 0x7362);
  cols[0] = __byte_perm(low01, low23, 0x5410);
  cols[1] = __byte_perm(low01, low23, 0x7632);
  cols[2] = __byte_perm(high01, high23, 0x5410);
  cols[3] = __byte_perm(high01, high23, 0x7632);
}

// Writes 16 rows of one column, of which `left` exist. The address of a column is a multiple of
// num_rows, which decides how many bytes can be written at once.
__device__ __forceinline__ void write_column(unsigned char* column, const unsigned (&words)[4],
                                             long long num_rows, int left) {
  if (num_rows % 16 == 0) {
    if (left > 0) {
      *reinterpret_cast<uint4*>(column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else if (num_rows % 4 == 0) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if (4 * word < left) reinterpret_cast<unsigned*>(column)[word] = words[word];
    }
  } else if (num_rows % 2 == 0) {
#pragma unroll
    for (int half = 0; half < 8; ++half) {
      if (2 * half < left) {
        reinterpret_cast<unsigned short*>(column)[half] =
            static_cast<unsigned short>(words[half / 2] >> half % 2 * 16);
      }
    }
  } else {
#pragma unroll
    for (int byte = 0; byte < 16; ++byte) {
      if (byte < left) {
        column[byte] = static_cast<unsigned char>(words[byte / 4] >> byte % 4 * 8);
      }
    }
  }
}

// Writes the square to `transposed`, which is [num_cols, num_rows] and contiguous. Called by a
// block of 256 threads: a lane takes 16 rows of 4 columns, so that 8 lanes write 128 bytes of a
// column.
__device__ __forceinline__ void write_transposed(const unsigned char* square,
                                                 unsigned char* transposed, long long first_row,
                                                 long long first_col, long long num_rows,
                                                 long long num_cols) {
  const int lane = threadIdx.x % 32, group = lane / 4, four = threadIdx.x / 32 * 4 + lane % 4;
  unsigned cols[4][4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    unsigned rows[4], turned[4];
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      rows[at] = *reinterpret_cast<const unsigned*>(
          square + place_in_square(group * 16 + part * 4 + at, four * 4));
    }
    transpose_bytes(rows, turned);
#pragma unroll
    for (int at = 0; at < 4; ++at) cols[at][part] = turned[at];
  }
  const long long row = first_row + group * 16;
#pragma unroll
  for (int at = 0; at < 4; ++at) {
    const long long col = first_col + four * 4 + at;
    if (col >= num_cols) continue;
    unsigned char* column = transposed + col * num_rows + row;
    write_column(column, cols[at], num_rows, static_cast<int>(min(num_rows - row, 16ll)));
  }
}

template <class Source>
struct Quantize {
  using Float8 = typename Source::Float8;

  Source source;
  Float8* data;  // null: not wanted
  long long data_stride;
  Float8* transposed;  // [num_cols, num_rows], contiguous; null: not wanted
  long long num_rows;
  long long num_cols;
  void* partial_sums;  // [rows of squares, num_cols] in the arithmetic's type, if sums are wanted
};

// has_sums: whether sums of x over rows are wanted.
template <class Source, bool has_sums, Tile tile>
__global__ void __launch_bounds__(tile.block_size(), tile.blocks_per_sm)
    quantize(const Quantize<Source> call) {
  using Float8 = typename Source::Float8;
  constexpr int side = square_side, pack_size = tile.pack_size;
  constexpr int rows_of_pass = tile.rows_per_block, num_passes = side / rows_of_pass;
  constexpr int in_flight =
      num_passes < Source::most_in_flight ? num_passes : Source::most_in_flight;
  static_assert(tile.threads_per_row * pack_size == side && tile.block_size() == 256,
                "256 threads divide the columns of a square among themselves");
  static_assert(num_passes % in_flight == 0, "no pass goes beyond the last row of the square");
  unsigned char* square = dynamic_smem();
  const long long squares_across = (call.num_cols + side - 1) / side;
  // The last squares first: if the L2 cache still has a part of the matrix, it is the end.
  const long long turn = gridDim.x - 1 - blockIdx.x;
  const long long first_row = turn / squares_across * side;
  const long long first_col = turn % squares_across * side;

  const int own_row = threadIdx.x / tile.threads_per_row;
  const int own_col = threadIdx.x % tile.threads_per_row * pack_size;
  const long long col = first_col + own_col;
  const bool in_row = col < call.num_cols;
  const auto kept = call.source.template keep<pack_size>(in_row ? col : 0);
  const auto factor = call.source.factor();
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
      if (in_row && row < call.num_rows)
        fetched[at] = call.source.template fetch<pack_size>(row, col);
    }
#pragma unroll
    for (int at = 0; at < in_flight; ++at) {
      const int row_of_square = own_row + (first + at) * rows_of_pass;
      const long long row = first_row + row_of_square;
      Pack<Float8, pack_size> converted{};
      if (in_row && row < call.num_rows) {
        converted = call.source.template convert<pack_size>(fetched[at], kept, factor, largest);
        if (call.data != nullptr)
          store_pack<pack_size>(call.data + row * call.data_stride + col, converted);
      }
      store_pack<pack_size>(
          reinterpret_cast<Float8*>(square + place_in_square(row_of_square, own_col)), converted);
      if constexpr (has_sums) {
        Compute values[pack_size];
        unpack(fetched[at].pack, values);
#pragma unroll
        for (int each = 0; each < pack_size; ++each) sums[each] += values[each];
      }
    }
  }
  call.source.finish(largest);
  if constexpr (has_sums) {
    Compute* total =
        static_cast<Compute*>(call.partial_sums) + first_row / side * call.num_cols + first_col;
    add_groups<side, rows_of_pass>(reinterpret_cast<Compute*>(square + side * side), sums, own_row,
                                   own_col, total, call.num_cols - first_col);
  }
  if (call.transposed == nullptr) return;
  __syncthreads();
  write_transposed(square, reinterpret_cast<unsigned char*>(call.transposed), first_row, first_col,
                   call.num_rows, call.num_cols);
}
