"""tools/ and benchmarks/ under test."""
