"""The contract, native and the adapters under test."""
