"""The gradient check: kernels, or anybody's function, against float64."""
