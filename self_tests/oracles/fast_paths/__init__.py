"""Second oracles of the chapter fast_paths."""
