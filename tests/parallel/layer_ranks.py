"""Checks of LayerNormLinear on several ranks, by processes: see start_ranks.py."""

from __future__ import annotations

import layer_fp8_ranks  # noqa: F401  (adds to CHECKS)
import layer_option_ranks  # noqa: F401  (adds to CHECKS)
import layer_state_ranks  # noqa: F401  (adds to CHECKS)
from layer_cases import CHECKS, MAIN  # noqa: F401  (the test takes MAIN)
from start_ranks import main

if __name__ == "__main__":
    main(CHECKS)
