"""The chapter checkpoints."""
