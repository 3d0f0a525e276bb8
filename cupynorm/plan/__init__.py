"""From a problem to a plan: strategy, tile, kernel and grid.
Pure Python: no GPU, no CuPy, no torch.
"""
