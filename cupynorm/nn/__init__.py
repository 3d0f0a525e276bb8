"""torch: autograd, modules, swapping the norms of a model, DTensors, scales.

autograd            a call of tensors: tells eager from traced and transformed, records it
by_torch            what is traced or transformed, as torch operations; DTensors
modes               what torch does with a call; dtypes by name and under torch.autocast
modules             LayerNorm and RMSNorm
swap                swap_norms, and how it finds out what a module computes
enable              torch's own norms by our kernels
scales              fp8_autocast, also in checkpoints, and how scales are kept
quantization        matrices in 8 bits, and products of them
private             what this library uses of torch that is not public
"""
