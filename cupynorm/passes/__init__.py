"""Graph passes: what torch.compile does with norms, and with what is around them.

install, inductor, report      compile_passes, as inductor takes it; what was done
before_autograd                the first pass: a norm and what it takes in become one operator
norms, surroundings, rule      finds norms, and what is around them; which are replaced
spellings                      which operation a node is
after_autograd, joint_nodes    the second pass: casts and sums of gradients
two_dtypes, dx_sums            y in two dtypes, and sums of dx over rows
lower, graph_operators         operators that are cheaper to call
direct_calls, known_calls      calls without torch's dispatcher
"""
