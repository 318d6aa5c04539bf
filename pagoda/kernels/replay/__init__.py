"""A forward recorded once as a list of calls, and replayed natively in one call."""
