"""Judges of load meters, called by the checks of this chapter."""
