"""Workloads of load meters."""
