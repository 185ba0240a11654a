"""A training step: a small model, its loss over counted tokens, clipping, AdamW and SGD."""
