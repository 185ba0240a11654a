"""Comparisons of tensors: exact, or within an error bound per element."""
