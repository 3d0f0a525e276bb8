"""The GPU, its driver, and the versions of the libraries on this machine."""

from __future__ import annotations

import datetime
import platform
import re
import sys
from pathlib import Path

import numpy as np

from .. import __version__
from . import nvrtc


def has_gpu() -> bool:
    """Whether CuPy is installed and finds a GPU."""
    try:
        return nvrtc.cupy().cuda.runtime.getDeviceCount() > 0
    except Exception:
        return False


def environment() -> dict[str, str | None]:
    """GPU, driver, versions and date. A missing one is None. Does not import torch."""
    names = ("gpu", "driver", "cuda_runtime", "nvrtc", "cupy", "torch")
    versions: dict[str, str | None] = dict.fromkeys(names)
    try:
        cupy = nvrtc.cupy()
        versions["cupy"] = cupy.__version__
        version = cupy.cuda.runtime.runtimeGetVersion()
        versions["cuda_runtime"] = f"{version // 1000}.{version % 1000 // 10}"
        versions["nvrtc"] = ".".join(map(str, nvrtc.version()))
    except Exception:  # a library is missing or does not load; keep what was found so far
        pass
    if has_gpu():
        runtime = nvrtc.cupy().cuda.runtime
        name = runtime.getDeviceProperties(runtime.getDevice())["name"]
        versions["gpu"] = name.decode() if isinstance(name, bytes) else name
        versions["driver"] = _driver()
    import importlib.metadata  # takes a tenth of the time of importing all of the package

    try:
        loaded = getattr(sys.modules.get("torch"), "__version__", None)
        versions["torch"] = str(loaded or importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        pass
    return versions | {
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cupynorm": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        return re.search(r"\d+\.\d+(\.\d+)?", text)[0]
    except (OSError, TypeError):  # not Linux, or another format
        version = nvrtc.cupy().cuda.runtime.driverGetVersion()
        return f"for CUDA {version // 1000}.{version % 1000 // 10}"
