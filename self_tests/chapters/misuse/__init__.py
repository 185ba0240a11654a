"""The chapter misuse."""
