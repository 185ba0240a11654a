"""Stand-ins for kernels, each held against a naive second implementation that sees all ranks."""
