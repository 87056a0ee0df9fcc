"""What stress runs and benchmarks share: rebalancers as children, run folders, a MoE model."""
