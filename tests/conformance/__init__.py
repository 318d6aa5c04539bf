"""Replay of scheduler scenarios: what is scheduled, step by step, against what is expected."""
