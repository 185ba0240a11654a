"""The pinned workloads of fused and low-latency token exchanges."""
