"""Second oracles of the chapter config_rules."""
