// fp8_square.cuh -- a square of 128 x 128 8-bit floats in shared memory, and its columns as rows
#pragma once

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
