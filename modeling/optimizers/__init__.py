"""Optimizers for the outer loop: levels that learn at different speeds, capacity that opens in training."""
