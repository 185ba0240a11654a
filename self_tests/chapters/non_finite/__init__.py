"""The chapter non_finite."""
