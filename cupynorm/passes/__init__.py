"""Graph passes: what torch.compile does with norms, and with what is around them."""
