"""A model from its `config.json`, without transformers.

config          reads the sizes of a model
fields          the same field under the names that families give it
families        what each `model_type` means, from families.json and family_defaults.json
encoder_decoder the config of an encoder and a decoder as two
unlike_llama    what contradicts a count of an unknown family as a Llama
"""
