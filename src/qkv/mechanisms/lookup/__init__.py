"""Mechanisms that differ in how a query is compared with keys; query, key and value are given."""
