"""The pinned workloads of groups: sizes that do not divide, and the proxy model."""
