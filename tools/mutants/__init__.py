"""Mutants of the oracles: small changes that a pair's tests must notice; `python -m mutants`, see docs/mutants.md."""
