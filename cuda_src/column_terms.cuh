// column_terms.cuh -- what a column of norm_linear.cu's y adds to its product
#pragma once

// y = rstd (product - mean sum) + bias
struct alignas(8) ColumnTerms {
  float sum;
  float bias;
};
