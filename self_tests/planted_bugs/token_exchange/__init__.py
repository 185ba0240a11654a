"""Planted bugs of the fused token exchange."""
