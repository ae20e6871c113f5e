"""One call of each kernel: which one, its argument block, its tasks and its threads.

forward, forward_arguments    many queries
decode                        few queries: the kernel, how a step is shared out, its arguments
gradient                      the whole backward pass: backward, after delta_correction if needed
backward, backward_arguments  its kernels and tasks, its arguments and results
delta_correction              lse and what delta lacks, from sums over keys
tangents                      second derivatives: what the kernel takes, its tasks and results
replay, weight_blocks         questions of `qkv.inspect` about weights
arguments, scratch            what all argument blocks have, and memory that calls use in turn
workers                       how many threads pay, and running tasks slice by slice
"""
