"""Pinned workloads of the exchange beside those of recipes.py."""
