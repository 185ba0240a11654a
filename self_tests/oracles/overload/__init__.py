"""Second oracles of the chapter overload."""
