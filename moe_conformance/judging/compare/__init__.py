"""Comparisons: exact, and within a bound that is derived for every element."""
