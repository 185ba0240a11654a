"""The chapter routing."""
