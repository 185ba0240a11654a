"""Judges of permute and unpermute, called by the checks of this chapter."""
