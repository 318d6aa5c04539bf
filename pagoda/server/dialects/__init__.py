"""One file per API: the form of its requests, answers, streams and errors. See `Dialect` in server/turn.py."""
