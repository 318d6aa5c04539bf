"""Mixture of experts: routing, grouped expert products, and their weighted sum."""
