"""From a problem to a plan: strategy, tile, kernel and grid.
Pure Python: no GPU, no CuPy, no torch.

given       problem (with Tile), devices
the choice  dispatch makes it, from the table in strategies; model derives a tile from what fits,
            and judges a caller's; measured has faster ones, from one file a device
rows        grids: what their number changes; kernels of whole matrices
C++         instances and functor_text: names of kernels and structs
others      *product*: kernels that are no norm alone; candidates: for tune
"""
