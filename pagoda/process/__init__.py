"""What processes need whatever they compute: children, their ends, logs, memory, and whether they make progress."""
