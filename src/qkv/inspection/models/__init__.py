"""Every head of a model.

model_record    of one text: layer_record of each layer; keep, which layers; model_file
comparison      of two records
corpus          over many texts, with confidence intervals; corpus_folder keeps them
"""
