"""The chapter config_rules."""
