"""Looking into attention: weights, statistics and traces, recomputed from query, key and lse.

traces      one example step by step: `qkv.explain`
weights     any weight, computed again; the lazy array of all
records     the result of `qkv.inspect`, one call
heads       scores of the heads of a layer
models      every head of a model, over a text or a corpus
rendering   results as pages, pictures and words
summaries   the texts of records
"""
