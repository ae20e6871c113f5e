"""The decode kernel: few queries against many keys, split over tasks (split-K).

Sums are of `Spec.compute_dtype`, which is float32 for float16 and bfloat16. The products are in
`products.dim_lanes`; blocks of keys and how their results are merged are in `kernel`.
"""
