"""An engine process that starts as often as its environment says (ENGINE_LIVES) and never again.

Lives are counted in the file that ENGINE_LIVES_FILE names. Its steps can be
limited as those of stepped_engine.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    count = Path(os.environ["ENGINE_LIVES_FILE"])
    lives = len(count.read_text()) if count.exists() else 0
    if lives >= int(os.environ["ENGINE_LIVES"]):
        sys.exit(7)
    count.write_text("x" * (lives + 1))

    from pagoda.assembly import engine_process  # one that may not live need not import it
    from tests.engine.stepped_engine import limit_steps

    limit_steps()
    engine_process.main()
