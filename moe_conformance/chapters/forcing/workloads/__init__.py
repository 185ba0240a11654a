"""The pinned workloads of forced routing."""
