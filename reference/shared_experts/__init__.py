"""Oracles of shared experts and of whole layers."""
