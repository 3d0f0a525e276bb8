"""Whether NVRTC is here: tests that compile for a GPU are skipped without it."""

from __future__ import annotations

import pytest

from cupynorm.gpu import nvrtc


def why_nvrtc_is_missing() -> str:
    try:
        nvrtc.version()
    except Exception as error:
        return f"NVRTC is needed to compile: {error}"
    return ""


WHY_MISSING = why_nvrtc_is_missing()
needs_nvrtc = pytest.mark.skipif(bool(WHY_MISSING), reason=WHY_MISSING or "NVRTC is here")
