"""The ops that models are written in, and the nouns they take. No torch: tensors are opaque here."""
