"""What the engine does only where ranks use GPUs: delays of streams, checks after each job, shares of GPUs."""
