"""RULE: planted bugs of configurations."""
