"""Low-rank updates of linear layers and embeddings (LoRA adapters), one per row of the batch."""
