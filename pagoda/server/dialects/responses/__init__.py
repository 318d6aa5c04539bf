"""OpenAI's Responses. Begin with dialect.py: from a body to a turn, and from a turn to an answer.

bodies.py: what is asked; input.py: the conversation that it is; tools.py: its tools; events.py: what is answered.
Stored responses, and the routes, are in server/stored/.
"""
