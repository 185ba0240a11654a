"""What ranks need beside a process group where their tensors live on GPUs."""
