"""What all families share: the workload, its kind, options, sums over ranks, prediction."""
