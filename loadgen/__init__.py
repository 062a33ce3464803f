"""Load for a gateway: workloads, arrivals, a client, measures, comparisons and their report."""
