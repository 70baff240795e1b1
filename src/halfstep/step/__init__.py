"""One optimizer step and its safety: compute, judge, commit. Knows no workload and no file."""
