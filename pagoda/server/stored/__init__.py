"""The responses and conversations that a server keeps: the store, its file, and the routes that ask for it."""
