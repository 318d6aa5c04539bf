"""python -m tests.conformance SCENARIOS.json OUT.jsonl: replay a file of scenarios on pagoda's scheduler.

A scenario that the scheduler cannot take becomes one line with its error; the others go on. Exit status 1 then.
"""

import json
import sys
import traceback
from pathlib import Path

from tests.conformance.pagoda_subject import PagodaSubject
from tests.conformance.replay import replay


def main(scenarios: Path, out: Path) -> int:
    failed = 0
    with out.open("w") as file:
        for scenario in json.loads(scenarios.read_text())["scenarios"]:
            try:
                for line in replay(scenario, PagodaSubject(scenario["config"])):
                    print(json.dumps(line, separators=(",", ":")), file=file)
            except Exception as error:  # whatever it is, it is a finding about this scenario alone
                traceback.print_exc()
                failed += 1
                print(
                    json.dumps({"scenario": scenario["name"], "error": f"{type(error).__name__}: {error}"}), file=file
                )
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
