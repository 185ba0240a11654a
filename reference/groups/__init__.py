"""Oracles of process groups and of a model that is divided over them."""
