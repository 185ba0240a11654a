"""Oracles of auxiliary losses."""
