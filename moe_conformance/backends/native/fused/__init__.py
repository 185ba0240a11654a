"""The fused token exchange, its managers and its wire formats."""
