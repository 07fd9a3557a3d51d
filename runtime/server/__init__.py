"""An OpenAI-compatible server over one runtime, whose response ids are durable nodes of session trees.

A request's way through: `app` routes it, `chat_request` or `responses_request` reads it, `asking` finds the place to go
on from and reads the messages in, `writing` draws the reply and reads it by token id, `chat_output` or
`responses_output` says it in the client's words, and `sessions` makes the place where it ended one to go on from.
"""
