"""Oracles of cost: rows, bytes and calls."""
