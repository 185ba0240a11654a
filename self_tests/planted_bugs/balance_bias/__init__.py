"""BIAS: bugs in the updates of balance biases."""
