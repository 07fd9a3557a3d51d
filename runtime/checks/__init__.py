"""The determinism contract, and what holds the engine to it.

**A row's bits follow from the build, the SIMD path, the model, the precision and the token ids up to it, and from
nothing else.** So a fork anywhere is exact, a prefix can be taken over from another session, and a lost state is made
again from its token ids. `selfcheck` puts this to the test on a user's own model, `tests/` on many small ones. Comments
elsewhere name the point that they serve:

a. KDA over many tokens is the one-token step repeated in order, so there are no chunks whose borders could matter.
b. MLA has one form, for one row or many. Its splits of the context begin at absolute multiples of a constant, each from
   minus infinity, and are merged from the first to the last. A row attends to latents as they are stored, its own among
   them: rounded once, or as 8-bit codes, which `fast` rounds once more as it reads them. What is masked is neither
   loaded nor multiplied.
c. The order in which an output is summed up is fixed, and one micro-kernel computes 1 or N rows. There is no BLAS on a
   row's way, no sum whose order follows the threads, no approximate reciprocal, and every computing thread has the same
   modes for rounding and for denormal numbers.
d. The outputs of a token's experts are added in ascending order of the experts, whichever was read first.
e. Among equals, the top k are those of the lowest index.
f. exp, tanh, sigmoid and softplus are one routine each. Router, gates, norms, convolutions and Attention Residuals are
   never quantised, and weights in BF16 or F32 meet float32 activations in `fast` as well.
g. Random numbers are drawn by counter, from seed, branch and position. A generation begins at the end of the last
   append: penalties, `min_tokens` and stop strings follow from the token ids since then, so that generating 10 tokens
   twice is generating 20. Parameters, seed and branch are durable before a token is shown.
h. Guesses that were wrong are undone by going on from the state before them.

Build and SIMD path are recorded with every stored state. A state that was stored with loss, or taken over `as_is` from
another build, is *inexact*, as is all that follows from it, and nothing else ever begins there.
"""
