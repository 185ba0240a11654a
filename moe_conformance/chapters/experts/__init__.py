"""The chapter experts."""
