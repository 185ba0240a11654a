"""Pinned workloads of routers."""
