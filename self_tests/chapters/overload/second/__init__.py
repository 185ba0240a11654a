"""The second oracle, written from the source and not from the first."""
