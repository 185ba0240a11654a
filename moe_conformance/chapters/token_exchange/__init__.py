"""The chapter token_exchange."""
