"""Real activations of a LayerNorm of a sentence encoder (MiniLM).

A row with an outlier, its gradient, and the weights.
"""
