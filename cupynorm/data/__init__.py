"""Real activations: a row with an outlier, its gradient and the weights of a LayerNorm of a sentence encoder (MiniLM)."""
