"""The chapter graphs."""
