"""Looking into attention: weights, statistics and traces, recomputed from query, key and lse."""
