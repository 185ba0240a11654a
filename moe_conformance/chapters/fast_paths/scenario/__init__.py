"""The surfaces that scripts of this chapter call on every rank."""
