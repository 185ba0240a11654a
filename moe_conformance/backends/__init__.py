"""Implementations under test: the embedded native one, and adapters to real libraries."""
