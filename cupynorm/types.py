"""The classes of what functions return, for isinstance and annotations: cupynorm.types.Forward.

Examples:
    >>> isinstance(cupynorm.plan(4096, device="H200"), cupynorm.types.Plan)
    True

None needs torch.
"""

from .dispatch.devices import Device as Device
from .dispatch.dispatch import Plan as Plan
from .dispatch.functor_text import Functor as Functor
from .explore.experiment import Experiment as Experiment
from .explore.explain import Explanation as Explanation
from .explore.trace import Trace as Trace
from .norm.quantized import QuantizedTensor as QuantizedTensor
from .norm.request import Backward as Backward
from .norm.request import Forward as Forward
from .norm.request import FusedBackward as FusedBackward
from .verify.results import CheckResult as CheckResult
