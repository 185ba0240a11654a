"""Judges of configuration rules, called by the checks of this chapter."""
