"""Scores of the heads of one layer.

head_scores     the scores; score_rows, those of each query; head_table, their means
layer_heads     the passes of attention that they are made of
earlier_tokens  masks of earlier tokens that are the same
unknown_tokens  tokens that share the id of unknown ones
kept_inputs     query and key of a layer, from which scores are made later
"""
