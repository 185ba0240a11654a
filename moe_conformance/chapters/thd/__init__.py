"""The chapter thd."""
