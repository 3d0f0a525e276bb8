"""The norms: the checks, prepared calls, and the same of arrays on the host.

request     a call as one value, and what it returns
checks      what a caller gives, as far as it can be wrong
arguments   from arrays to a plan, and to the words of each kernel's argument
prepared    a call on a GPU: planned once, then allocated and launched; the caches
quantized   8-bit results, and kernels of matrices
host        the same of arrays on the host, by the reference
calls       forwards and backwards: found by a key, or checked and prepared

cupynorm/functional.py has what users call; docs/design.md, "One call", has the steps.
"""
