"""Planted bugs of routers."""
