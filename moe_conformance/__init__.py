"""A conformance suite for implementations of Mixture-of-Experts parallelism."""
