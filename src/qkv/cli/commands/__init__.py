"""What each command prints.

inspect            where each head looks; inspect_json: its numbers as JSON
inspect_model      the heads of a whole model
explain            one row of attention, step by step
explain_mechanism  the same of another mechanism, on five tokens
compare            all mechanisms on the same five tokens
plan               what would run, and what it would take
cost               what a model or a mechanism costs
scaling            why scores are divided by sqrt(d_k)
errata             what the classical teaching texts print wrongly
lab                the page that shows attention happen
info               what this machine is, and what it can run
"""
