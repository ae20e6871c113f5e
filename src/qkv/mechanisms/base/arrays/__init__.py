"""Arrays of any library, as mechanisms are given them and compute with them.

rows           arrays that callers pass, declared by annotations
namespace      the functions of an array's library
head_rows      rows of all heads side by side, and apart
normalization  normalisations of rows
"""
