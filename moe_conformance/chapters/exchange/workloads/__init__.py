"""The pinned workloads of the exchange that only this chapter uses."""
