"""Judges that only this chapter uses."""
