"""The chapter equivalence."""
