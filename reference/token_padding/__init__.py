"""Oracles of token counts that are padded to one size."""
