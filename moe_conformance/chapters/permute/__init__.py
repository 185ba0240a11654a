"""The chapter permute."""
