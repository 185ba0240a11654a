"""Judges of scatter-adds of rows, called by the checks of this chapter."""
