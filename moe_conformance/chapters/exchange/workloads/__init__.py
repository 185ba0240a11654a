"""The pinned workloads of this chapter."""
