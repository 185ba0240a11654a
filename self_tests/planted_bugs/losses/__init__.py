"""Bugs in what trains a router beside the main loss."""
