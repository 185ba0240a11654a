"""Oracles of shortcuts."""
