"""Model files: configuration, safetensors, the table of expected tensors, and the forward pass built from them."""
