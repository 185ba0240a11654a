"""The chapter overload."""
