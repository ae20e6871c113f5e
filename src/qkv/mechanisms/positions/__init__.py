"""Mechanisms whose scores depend on where tokens stand."""
