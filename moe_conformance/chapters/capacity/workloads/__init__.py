"""The pinned workloads of capacity: routers, layers, exchanges and receive buffers."""
