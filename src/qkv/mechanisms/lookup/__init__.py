"""Mechanisms that differ in how a query is compared with keys; they have no projections."""
