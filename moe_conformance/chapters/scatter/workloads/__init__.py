"""The pinned workloads of scatter-add."""
