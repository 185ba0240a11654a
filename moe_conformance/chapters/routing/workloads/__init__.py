"""The pinned workloads of routing that only this chapter uses."""
