"""torch: autograd, modules, swapping the norms of a model, DTensors, fp8 recipes.

autograd                a call of tensors: tells eager from traced and transformed, records it
by_torch                what is traced or transformed, as torch operations; nested tensors, DTensors
modes                   what torch does with a call; dtypes by name and under torch.autocast
modules, second_names   LayerNorm and RMSNorm
swap, probe             swap_norms, and how it finds out what a module computes
autocast, recipes       fp8_autocast, also in checkpoints, and where scales come from
fp8, amaxes             the scales that DelayedScaling keeps, and the end of its step
quantization, products  matrices in 8 bits, and products of them
"""
