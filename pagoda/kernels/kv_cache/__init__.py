"""Writing the paged KV cache, and copying whole blocks of it."""
