"""Planted bugs of shared experts and whole layers."""
