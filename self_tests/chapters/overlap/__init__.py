"""The chapter overlap."""
