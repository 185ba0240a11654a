"""Planted bugs of whole training steps."""
