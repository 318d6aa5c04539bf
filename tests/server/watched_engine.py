"""The engine process, whose objects can be counted.

The environment's CENSUS_FOLDER names the folder of its census.
"""

import os
from pathlib import Path

from pagoda.assembly import engine_process
from tests.server.census import CensusTaker


def main() -> None:
    CensusTaker(Path(os.environ["CENSUS_FOLDER"]), "engine").start()
    engine_process.main()
