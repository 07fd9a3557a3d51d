"""Train the nano model: a 4 M parameter Kimi-K3 that remembers what it read. See README.md."""
