"""Pinned workloads of capacities and receive budgets."""
