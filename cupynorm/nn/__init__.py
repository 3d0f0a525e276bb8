"""torch: operators, autograd, modules, swapping the norms of a model, DTensor, fp8 recipes."""
