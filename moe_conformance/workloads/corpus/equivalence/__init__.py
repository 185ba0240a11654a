"""Workloads that must give what another gives."""
