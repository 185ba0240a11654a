"""The chapter capacity."""
