"""Rollouts: a share of a model's traffic moves to a new version, step by step and under guards."""
