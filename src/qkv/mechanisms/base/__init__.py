"""The parts of mechanisms: base classes, the shared example, explanations, costs.

mechanism     the base of all
attention     the base of those with a softmax, which call `qkv.attention`
unprojected   the base of those that attend without projections
projected     the base of those with projections
llama         the base of those with the projections of Llama
example       the five tokens that every mechanism can read
arguments     sizes, options and sequences, checked
operations    ledgers of what costs are added from
arrays        arrays of any library, what is declared of them, and functions on their rows
explanations  a calculation as steps
modules       modules of torch and transformers: their weights, and mechanisms beside them
"""
