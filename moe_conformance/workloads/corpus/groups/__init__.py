"""Pinned workloads of groups, sizes and divided models."""
