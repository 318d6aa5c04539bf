"""A forward recorded once as a list of steps, and replayed natively in one call."""
