"""What one run is fed, as records of CPU tensors, and how their tensors are made."""
