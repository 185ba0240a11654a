"""The chapter shared_experts."""
