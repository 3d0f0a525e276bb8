"""Random calls, held to float64: `python -m cupynorm fuzz`.

Reading order: draws (what is drawn), placement (memory and guards), memory (on a GPU), calls (the
public API on a GPU), judge (what a result is held to), smaller (the smallest call that still
fails), command.
"""

from ...plan.problem import Tile
from ..cases import Case
from ..quantized import How
from .draws import Draw
from .judge import rerun

__all__ = ["Case", "Draw", "How", "Tile", "rerun"]
