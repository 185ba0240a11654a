"""The pinned workloads of gradients that only this chapter uses."""
