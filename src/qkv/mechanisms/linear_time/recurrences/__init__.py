"""What mechanisms of linear time are made of.

stateful     the base of those that decode from a state of fixed size
recurrent    the base of those whose state is a recurrence over tokens
chunks       recurrences chunk after chunk of tokens
scan         the linear recurrence without a loop over all tokens
delta_rule   the gated delta rule
convolution  the short causal convolution in front of state space models
activations  activation functions with finite values and gradients everywhere
state_space  initial weights of state space models
"""
