"""The session monitor: a runtime's sessions, budget and events in a terminal, and actions on them.

`source.py` says what is watched, `model.py` what is known of it, the `*_page.py` files how it reads as lines of text,
and `app.py` puts those on a terminal. Only `app.py`, `widgets.py` and `dialogs.py` need Textual.
"""
