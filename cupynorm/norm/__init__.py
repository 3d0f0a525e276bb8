"""The norms: what users call, the checks, prepared calls, and the same of arrays on the host."""
