"""Recurrent layers: causal convolutions over a few tokens, Mamba-2 and the gated delta rule; with cached states."""
