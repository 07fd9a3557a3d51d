"""How the store's files are written and read: codecs, parts, manifests, and the disk calls beneath."""
