"""Real activations: 10 rows each, the outliers among them, of three LayerNorms of a pretrained sentence encoder (MiniLM)."""
