"""Judges of whole layers, and of the small model that consists of them."""
