"""A server over one runtime for clients of OpenAI and Anthropic, whose response ids are durable nodes of session trees.

A request's way through: `app` routes it, `chat_request`, `responses_request` or `messages_request` reads it, `asking`
finds the place to go on from and reads the messages in, `writing` draws the reply and reads it by token id,
`chat_output`, `responses_output` or `messages_output` says it in the client's words, and `sessions` makes the place
where it ended one to go on from.
"""
