"""Random problems: their structures, values and places in memory."""
