"""Which of the workloads a profile runs."""
