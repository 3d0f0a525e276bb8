"""From a problem to a plan: strategy, tile, kernel and grid.
Pure Python: no GPU, no CuPy, no torch.

given       problem (with Tile), devices
the choice  dispatch makes it, from the table in strategies; paths derives a tile from what fits
            (tile_model, abilities), measured has faster ones, tile_checks judges a caller's
rows        grids and few_rows: what their number changes
C++         instances and functors: names of kernels and structs
others      matrices and *products: kernels that are no norm alone; candidates: for tune
"""
