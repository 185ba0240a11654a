"""Second oracles of the chapter token_padding."""
