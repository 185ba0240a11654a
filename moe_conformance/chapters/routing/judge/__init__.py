"""Judges of routing, called by the checks of this chapter."""
