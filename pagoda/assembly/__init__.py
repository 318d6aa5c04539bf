"""What wires the engine together: settings become decisions, a worker per rank, an engine core and its process."""
