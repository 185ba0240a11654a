"""Judges of balance biases, called by the checks of this chapter."""
