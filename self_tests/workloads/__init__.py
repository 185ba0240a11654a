"""The workloads under test: corpus, drawn batches, the quick profile."""
