"""Judges of gradients, called by the checks of this chapter."""
