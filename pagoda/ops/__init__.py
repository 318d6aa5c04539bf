"""The ops that models call, and the types of their arguments. No torch: tensors are opaque here."""
