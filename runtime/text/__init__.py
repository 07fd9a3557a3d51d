"""Text to token ids and back, never splitting a character and never forging a control token."""
