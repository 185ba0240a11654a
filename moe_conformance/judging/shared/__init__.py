"""Judges that several chapters use, by surface."""
