"""An engine process whose tier takes 20 ms to write a record. `python -m tests.engine.slow_disk_engine`"""

import time
from typing import Any

from pagoda.assembly.engine_process import main
from pagoda.tier.records import Records

if __name__ == "__main__":
    write = Records.write

    def slow(records: Records, *args: Any) -> None:
        time.sleep(0.02)
        write(records, *args)

    Records.write = slow  # type: ignore[method-assign]
    main()
