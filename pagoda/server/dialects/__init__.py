"""An API each, in a file or a folder: the form of its requests, answers, streams and errors.

What a dialect is, says `Dialect` in server/turn.py; infill.py is the shortest. Its router is listed in server/app.py.
transcript.py: messages of other APIs in the form that chat templates read.
"""
