"""One example step by step: `qkv.explain`, which makes a Trace.

explain        from steps and streaming, and gradient for the backward pass
trace          the Trace; trace_fields, trace_data (JSON), trace_shapes and trace_text are its parts
steps          every step of softmax attention in float64
streaming      the same from tile to tile
gradient       the arithmetic of derivatives
"""
