"""The gradient check: kernels, or a user's own functions, against float64."""
