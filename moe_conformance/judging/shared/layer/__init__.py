"""Judges of whole layers and of the small model that is made of them."""
