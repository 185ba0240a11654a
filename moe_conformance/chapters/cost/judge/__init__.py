"""Judges of communication cost, called by the checks of this chapter."""
