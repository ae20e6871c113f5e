"""Looking into attention: weights, statistics and traces, recomputed from query, key and lse.

explain         `qkv.explain`, which makes a Trace from steps, streaming and gradient
trace           the Trace; trace_fields, trace_data (JSON) and trace_text are its parts
record          the result of `qkv.inspect`: key_mass, record_pictures, record_file
model_record    every head of a model: layer_record, head_scores, earlier_tokens, kept_inputs;
                keep, which layers; model_file; comparison of two, head_table
layer_heads     the passes that scores are made of; score_rows, the scores of one layer
corpus          every head over many texts, with confidence intervals; corpus_folder keeps them
weights         the lazy array of weights: weight_reductions, weight_blocks, and replay
statistics      those of rows, for backends that have none
non_finite      which rows are NaN, and why
unknown_tokens  tokens that share the id of unknown ones
variant_data    variants as names, numbers and arrays
summaries       the texts of records
pages, pictures, tokens
                results as HTML, as SVG and PNG, and tokens made safe to print
progress_bar    of commands and pictures that take long
token_texts     each token of a tokenizer as a person can read it
counts          counts in words
"""
