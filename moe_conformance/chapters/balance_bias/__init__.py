"""The chapter balance_bias."""
