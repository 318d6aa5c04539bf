"""`python -m pagoda` is the `pagoda` command."""

from pagoda.cli.main import main

if __name__ == "__main__":
    main()
