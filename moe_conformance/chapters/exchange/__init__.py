"""The chapter exchange."""
