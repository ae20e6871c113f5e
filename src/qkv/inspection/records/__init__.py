"""What `qkv.inspect` keeps of one call.

record         the result; key_mass, record_pictures and record_file are its parts
non_finite     which rows are NaN, and why
variant_data   variants as names, numbers and arrays
"""
