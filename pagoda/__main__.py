"""The `pagoda` command, also as `python -m pagoda`: an interrupt ends it without a traceback, even while it imports."""

import sys


def main() -> None:
    """Run the command line of this process and exit; see `pagoda.cli.main`."""
    try:
        from pagoda.process.allocator import collecting_nothing

        with collecting_nothing():
            from pagoda.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which `-m` has put in front of Python's own
    main()
