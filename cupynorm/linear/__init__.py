"""A norm and the linear layer after it."""
