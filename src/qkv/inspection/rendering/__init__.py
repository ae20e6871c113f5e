"""How results are shown; their texts are in `qkv.inspection.summaries`.

pages, pictures   as HTML, as SVG and PNG
tokens            made safe to print
token_texts       each token of a tokenizer as a person can read it
counts            counts in words
progress_bar      of commands and pictures that take long
"""
