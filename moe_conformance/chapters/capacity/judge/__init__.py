"""Judges of capacity and receive buffers, called by the checks of this chapter."""
