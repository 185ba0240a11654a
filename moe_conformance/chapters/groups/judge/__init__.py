"""Judges of process groups and proxy models, called by the checks of this chapter."""
