"""Judges of overlapped steps, called by the checks of this chapter."""
