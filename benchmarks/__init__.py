"""Measurements of the engine and of the product, side by side with what else there is; see docs/benchmarks.md."""
