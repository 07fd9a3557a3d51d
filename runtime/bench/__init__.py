"""The commands behind every figure the project states, and the random models they run on."""
