"""Oracles of the fused token exchange: layouts, wire formats, combine."""
