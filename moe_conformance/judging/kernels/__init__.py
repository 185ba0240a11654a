"""Judges of single operations: fused token exchange, permute, row index, layouts, THD."""
