"""Tools to look at kernels: what a call does and why, what threads read and wait for."""
