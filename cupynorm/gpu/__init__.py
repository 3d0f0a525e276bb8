"""Code that uses a GPU or CuPy: NVRTC, launches, arrays, cuBLAS. on_cpu runs kernels on the CPU."""
