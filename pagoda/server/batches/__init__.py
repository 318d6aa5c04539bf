"""Files that callers upload, and batches: the answers to a file of requests, a line each."""
