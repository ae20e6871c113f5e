"""The parts of mechanisms: base classes, the shared example, explanations, costs.

mechanism       the base of all; attention: of those with a softmax, which call `qkv.attention`
unprojected, projected, llama
                attention without projections, with them, and with those of Llama
head_rows       rows of all heads side by side, and apart
example         the five tokens that every mechanism can read
explanation     a calculation as steps; attention_steps: those of a softmax
operations      ledgers of what costs are added from
arguments       sizes, options and sequences, checked; rows declares arrays where they are annotated
namespace       the functions of an array's library; normalization is written with them
loading         weights of torch and transformers modules; comparing: mechanisms beside these
"""
