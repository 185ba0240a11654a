"""The pinned workloads: a file or a folder for each chapter."""
