"""Second oracles of the chapter gradients."""
