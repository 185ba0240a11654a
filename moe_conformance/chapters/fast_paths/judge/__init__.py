"""Judges of fast paths, called by the checks of this chapter."""
