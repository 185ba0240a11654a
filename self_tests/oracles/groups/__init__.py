"""Second oracles of the chapter groups."""
