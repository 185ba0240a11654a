"""Oracles of the gradients of a whole model: norms, clipping, shards."""
