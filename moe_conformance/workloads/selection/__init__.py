"""Select the workloads that a profile runs, and the order and shards in which they run."""
