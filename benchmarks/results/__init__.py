"""What is kept of a run, and how it is shown.

record   a run, and its form as JSON
samples  medians and ratios
report   a run as lines and cells
compare  two runs beside each other
tables   a table in the terminal and in Markdown
picture  a run as SVG
"""
