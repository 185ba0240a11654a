"""The chapter forcing."""
