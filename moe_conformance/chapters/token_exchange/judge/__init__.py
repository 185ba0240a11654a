"""Judges of fused token exchanges, called by the checks of this chapter."""
