"""OpenAI's chats and completions of text, each in a file: chat.py, completions.py.

body.py: the fields that both have, and those that are refused; answers.py: what their answers have in common.
"""
