"""The engine process, whose objects can be counted: `python -m tests.server.watched_engine`.

The environment's CENSUS_FOLDER names the folder of its census.
"""

import os
from pathlib import Path

from pagoda.assembly.engine_process import main
from tests.server.census import CensusTaker


def main_watched() -> None:
    CensusTaker(Path(os.environ["CENSUS_FOLDER"]), "engine").start()
    main()


if __name__ == "__main__":
    main_watched()
