"""Planted bugs of the exchange."""
