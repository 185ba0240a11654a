"""The pinned workloads of the load meter."""
