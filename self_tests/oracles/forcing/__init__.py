"""Second oracles of the chapter forcing."""
