"""Second oracles of the chapter capacity."""
