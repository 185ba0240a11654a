"""Second oracles of the chapter routing."""
