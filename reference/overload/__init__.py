"""Oracles of the reports of load and overload."""
