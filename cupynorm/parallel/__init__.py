"""A norm and the linear layer after it, on several ranks of torch.distributed."""
