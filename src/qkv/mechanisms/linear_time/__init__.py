"""Mechanisms whose time and memory grow in proportion to the number of tokens.

linear, performer     products of features in place of a softmax
linformer             attention to a fixed number of mixtures of keys
rwkv4, rwkv6          time mixing with decay
mamba, mamba2         state space models
gated_delta           gated delta networks
recurrences           base classes and recurrences, of which these are made
"""
