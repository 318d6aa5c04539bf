"""What an answer says: the formats of reasoning (reasoning.py) and of calls (tool_parsers/), and whole answers."""
