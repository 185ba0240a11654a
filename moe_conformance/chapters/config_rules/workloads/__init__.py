"""The pinned workloads of configuration rules: settings, and exchanges of packed sequences."""
