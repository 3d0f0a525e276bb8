"""Times kernels beside those of other libraries, and finds better tiles."""
