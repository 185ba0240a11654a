"""The records that describe one run, with CPU tensors, and the functions that draw these tensors."""
