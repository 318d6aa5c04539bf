"""An engine process whose tier takes 20 ms to write a record."""

import time
from typing import Any

from pagoda.assembly import engine_process
from pagoda.tier.records import Records


def main() -> None:
    write = Records.write

    def slow(records: Records, *args: Any) -> None:
        time.sleep(0.02)
        write(records, *args)

    Records.write = slow  # type: ignore[method-assign]
    engine_process.main()
