"""Experts read from disk when the router picks them, so that a model can be far larger than memory."""
