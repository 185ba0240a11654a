"""Second oracles of the chapter checkpoints."""
