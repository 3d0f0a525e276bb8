// apply_functor -- f(x) of every element, or the gradients of f; each thread owns elements
// owns:  every grid's width-th element. It is for the float64 reference: the norms of a GPU have f
//        in their own kernels (functor.cuh, functor_gradient.cuh)
// moves: x once in, f(x) once out; backward: x and the gradient of f(x) in, that of x out
// takes: any number of rows and columns
// needs: matrices without gaps
#include "functor_gradient.cuh"
#include "tile.cuh"

template <class C, class Functor>
struct Elements {
  Functor functor;
  const C* x;
  const C* dy;  // of f(x); read only backward
  C* results;   // f(x); backward, the gradient of x
  long long num_rows;
  long long num_cols;
};

template <class C, class Functor, bool backward>
__global__ void apply_functor(const Elements<C, Functor> call) {
  const long long size = call.num_rows * call.num_cols;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; at < size;
       at += step) {
    const long long row = at / call.num_cols, col = at % call.num_cols;
    const OtherX<C, C> other{call.x + row * call.num_cols};
    C values[1] = {other(col)};
    if constexpr (backward) {
      const OtherX<C, C> other_gradient{call.dy + row * call.num_cols};
      C gradients[1] = {other_gradient(col)};
      call.functor.apply(row, col, values, gradients, other, other_gradient);
      call.results[at] = gradients[0];
    } else {
      call.functor.apply(row, col, values, other);
      call.results[at] = values[0];
    }
  }
}
