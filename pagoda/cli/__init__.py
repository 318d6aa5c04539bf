"""The `pagoda` command.

main.py registers the commands and turns errors into one line and an exit code. options.py makes a flag of every setting
of the engine, arguments.py reads the environment, files and vLLM's spellings, hints.py knows other programs' commands
and flags, and help_format.py formats the help. Commands that run a model in this process (generate.py, chat.py,
transcribe.py) share session.py, and console.py for the terminal. serve.py starts an engine process and the HTTP server;
plan.py says what would fit (layouts.py: divided among workers); doctor.py reports what the machine has; models.py lists
and fetches models.
bench/ measures: the engine in this process, a running server, a start, the scheduler alone. A command imports what it
needs when it runs, so that `pagoda --help` is fast.
"""
