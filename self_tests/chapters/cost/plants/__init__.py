"""Planted bugs that violate the requirements of this chapter."""
