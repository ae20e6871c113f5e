"""What classical texts of attention teach, to be run and read.

classical       `ScaledDotProductAttention`, a class with one method for each step
saturation      `scaling_curve`: why scores are divided by sqrt(d_k)
"""
