"""Residual sums, selecting rows, and splitting fused projections."""
