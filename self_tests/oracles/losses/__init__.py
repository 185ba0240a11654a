"""Second oracles of the chapter losses."""
