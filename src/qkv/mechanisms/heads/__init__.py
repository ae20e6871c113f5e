"""Mechanisms that differ in where queries, keys and values come from, and in their heads."""
