"""Second oracles of the chapter exchange."""
