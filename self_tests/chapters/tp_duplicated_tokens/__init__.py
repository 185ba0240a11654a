"""The chapter tp_duplicated_tokens."""
