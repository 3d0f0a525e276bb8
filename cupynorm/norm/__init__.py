"""The norms: what users call, the checks, prepared calls, and the same of arrays on the host.

a call      api, backward; options and request; route; checks; then prepared, with on_gpu and
            arguments, or host. docs/design.md, "One call", has the steps
parts of it functors, quantized_tensor; results; cache; checked_forward, what autograd needs
plans       plans and plan_command print them, tiles makes measured ones hold
matrices    quantize, reduce_matrix
"""
