"""Modules of torch and transformers.

loading    their weights, under the names that mechanisms use
comparing  mechanisms beside the modules that they were read from, on random input
"""
