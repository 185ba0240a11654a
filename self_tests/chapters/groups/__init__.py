"""The chapter groups."""
