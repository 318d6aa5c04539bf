"""`pagoda serve` that cannot process what its engine sends: `python -m tests.server.serve_broken serve FLAGS...`"""

from pagoda.cli.main import main
from pagoda.engine.outputs.output_processor import OutputProcessor


def broken(*args: object) -> None:
    raise KeyError("a defect")


if __name__ == "__main__":
    OutputProcessor.process = broken  # type: ignore[assignment,method-assign]
    main()
