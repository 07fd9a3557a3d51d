"""One timeline and everything that belongs to it: turns, state, what is kept of it, and chats on top."""
