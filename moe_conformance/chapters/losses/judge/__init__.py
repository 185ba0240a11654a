"""Judges of router losses, called by the checks of this chapter."""
