"""Second oracles of the chapter cost."""
