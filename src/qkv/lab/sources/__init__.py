"""What the lab is opened with, and what it shows of it.

source      a file, a record or arrays, as the lab takes them
shipped     what it shows where nothing was opened
heads       layers and heads of a source
weight_map  weights of one head at any length, as tiles of a map
thumbnails  a small picture of each head
notable     the head and the query at which a page of many heads opens
what_if     what a model predicts with some of its heads changed
"""
