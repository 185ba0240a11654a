"""The chapter determinism."""
