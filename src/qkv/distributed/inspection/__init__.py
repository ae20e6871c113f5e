"""Looking into attention whose rows are spread over ranks.

record       statistics of weights that no rank holds
head_scores  scores of the heads of a layer
"""
