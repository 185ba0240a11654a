"""The chapter fast_paths."""
