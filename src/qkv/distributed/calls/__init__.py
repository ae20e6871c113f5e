"""One call that all ranks make.

agreed_call   what each rank was given, compared before anything is computed
sharded_call  the call on one rank, and its gradient
ring          keys that travel from rank to rank, or are gathered
heads         all-to-all over heads (Ulysses)
parts         what a rank computes: parts of the problem, and how they merge
dtensors      shards as tensors or DTensors, in either layout
"""
