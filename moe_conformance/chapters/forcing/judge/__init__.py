"""Judges of forced routing, called by the checks of this chapter."""
