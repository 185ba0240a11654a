"""Pinned scripts of the fused token exchange."""
