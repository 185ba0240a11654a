"""The pinned workloads of shortcuts: round robin, equal splits, changed weights, counters, optional parts."""
