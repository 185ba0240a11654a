"""Oracles of permute: order, padding and index of rows."""
