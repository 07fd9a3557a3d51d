"""The engine without sessions: logits for comparison, and the promises held against a model."""
