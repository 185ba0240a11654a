"""Second oracles of the chapter token_exchange."""
