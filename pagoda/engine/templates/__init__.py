"""Chat templates: a conversation becomes the text of a prompt, rendered in this process, in Jinja's sandbox.

what goes in    chat_values.py: messages and tools, checked, in the form that templates expect; generic_tools.py:
                tools as text, for a template that does not support them
rendering       chat_template.py: ChatTemplate renders in its sandbox, and refuses what the template would silently drop
special tokens  special_marks.py: a mark that callers cannot guess replaces each special token that the template
                writes, and callers' text cannot become one, whatever the template cuts or joins

A template is trusted like the model's weights: it has no limit on time or memory. Callers' values are not trusted.
"""
