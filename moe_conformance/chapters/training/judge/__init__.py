"""Judges of training steps, called by the checks of this chapter."""
