"""From logits to a token: parameters, random numbers by counter, the draw itself, and guesses ahead of it."""
