"""FORCE: bugs of routers that a strategy forces."""
