"""torch: operators, autograd, modules, swapping the norms of a model, DTensor, fp8 recipes.

autograd                a call of tensors: tells eager from traced and transformed, records it
modes, repeated         what torch does with a call; whether it is like the last one of its kind
schemas, operators      torch.ops.cupynorm, which torch traces as one node
fused_operators         the same with fused options
functor_operators       the same with a user's functors
decompositions          the same as torch operations, for ONNX
formulas                norms and their derivatives as torch operations
modules, second_names   LayerNorm and RMSNorm
swap, probe             swap_norms, and how it finds out what a module computes
dtensor                 DTensors as arguments
dtensor_whole_rows      those whose rows are whole on each rank
nested                  nested tensors as arguments
autocast, recipes       fp8_autocast, and where scales come from
fp8, amaxes             the scales that DelayedScaling keeps, and the end of its step
fp8_norm, past_calls    modules with fp8_output; calls that a checkpoint runs again
quantization, products  matrices in 8 bits, and products of them
dtypes                  dtypes by name and under torch.autocast
"""
