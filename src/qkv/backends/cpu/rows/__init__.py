"""Compiled passes over rows before and after attention: rotary embedding and sinks."""
