"""The chapter token_padding."""
